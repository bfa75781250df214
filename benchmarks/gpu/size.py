"""What is measured on a device: GPT-2 124M on a GPU, a tiny one on a CPU, where only code is tried.

Every contender trains the same task on the same tokens: ``LanguageModel`` over ``GPT``, AdamW,
clipping to 1, bf16 by autocast, whole batches of ``micro_batch`` sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comparing import Between
from benchmarks.work import SAMPLES, as_is
from torsh_trainer import DataSource, OptimizerSpec
from torsh_trainer.optim.precision import Precision
from torsh_trainer.tasks.language_model import LanguageModel
from torsh_trainer.tasks.models import GPT

BF16 = Precision(compute="bf16")
CLIP = 1.0


@dataclass(frozen=True)
class Size:
    """A model, its batch, and for about how many seconds each side of a pair is measured."""

    name: str
    layers: int
    heads: int
    width: int
    vocab_size: int
    context: int
    micro_batch: int
    seconds: float
    compiles: bool

    def build_model(self) -> GPT:
        """The seeded model, on the CPU."""
        torch.manual_seed(0)
        return GPT(
            vocab_size=self.vocab_size,
            context=self.context,
            layers=self.layers,
            heads=self.heads,
            width=self.width,
        )

    @property
    def tokens_a_step(self) -> int:
        return self.micro_batch * self.context


TINY = Size("a tiny GPT", 2, 2, 16, 64, 16, 4, seconds=0.5, compiles=False)


def size_for(device: str) -> Size:
    """GPT-2 124M with a vocabulary of 50,304, with as large a micro-batch as surely fits twice."""
    if device == "cpu":
        return TINY
    memory = torch.cuda.get_device_properties(0).total_memory
    sizes = ((120e9, 32), (70e9, 16), (35e9, 8), (20e9, 4))
    micro_batch = next((batch for least, batch in sizes if memory >= least), 2)
    return Size("GPT-2 124M", 12, 12, 768, 50304, 1024, micro_batch, seconds=20.0, compiles=True)


class Tokens(Between):
    """Sequences of random tokens (batch, context + 1), fetched by the batch.

    Between blocks of the contender's steps the bare loop runs one, as ``Between`` has it.
    ``on_fetch`` is called with the number of batches fetched before.
    """

    def __init__(
        self,
        size: Size,
        device: str,
        bare: Callable[[int], None] = lambda steps: None,
        *,
        block: int = 10**9,
        on_fetch: Callable[[int], None] = lambda number: None,
    ) -> None:
        super().__init__(bare, block=block, warm_up=1)
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        generator = torch.Generator().manual_seed(1)
        shape = (SAMPLES, size.context + 1)
        self.tokens = torch.randint(size.vocab_size, shape, generator=generator).int()
        self.on_fetch = on_fetch

    def __getitems__(self, ids: list[int]) -> Any:
        self.on_fetch(self._calls)
        super().__getitems__(ids[:1])  # lets the bare loop have its turn
        return self.tokens[ids]

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index]


class Source(DataSource):
    """A dataset of whole sequences."""

    fixed_length = True
    collate = staticmethod(as_is)

    def __init__(self, data: Any, context: int) -> None:
        self.train = data
        self.context = context


def task_of(size: Size, data: Any = ()) -> LanguageModel:
    """The task of all contenders."""
    spec = OptimizerSpec("AdamW", lr=6e-4, options={"betas": (0.9, 0.95), "weight_decay": 0.1})
    return LanguageModel(size.build_model, Source(data, size.context), spec)


class BareSteps:
    """The bare loop: the task's forward and loss, torch's clipping and the task's optimizer.

    ``cut`` prepares the model before its optimizer is built (FSDP2).
    """

    def __init__(
        self,
        size: Size,
        device: str,
        batches: Iterator[Tensor],
        *,
        compiles: bool,
        cut: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        self.task = task_of(size)
        self.device = torch.device(device)
        model = cut(self.task.build_model().to(device))
        (self.optimizer,) = self.task.build_optimizers(model.named_parameters()).values()
        self.parameters = list(model.parameters())
        self.model = torch.compile(model) if compiles else model
        self.batches = batches

    def __call__(self, steps: int) -> None:
        """So many optimizer steps."""
        task, model, optimizer, device = self.task, self.model, self.optimizer, self.device
        for _ in range(steps):
            batch = next(self.batches).to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = task.loss(task.forward(model, batch), batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
            optimizer.step()


@contextlib.contextmanager
def waiting(device: str) -> Iterator[None]:
    """What the device has been given is done when the block is left."""
    yield
    if device == "cuda":
        torch.cuda.synchronize()
