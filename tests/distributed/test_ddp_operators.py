"""Operators of a step of ``ddp`` with overlap, beside DistributedDataParallel by hand, on CPUs.

The fake accelerator cannot run its reducer, which is C++ (record 0033).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from torsh_trainer import OptimizerSpec
from torsh_trainer.comm.base import Communicator
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.tasks.language_model import LanguageModel
from torsh_trainer.tasks.models import GPT
from torsh_trainer.testing.ranks import OPTIONS, shared_pool

CONTEXT, MICRO, ACCUMULATE, RANKS, WARM = 64, 4, 2, 2, 3


class Operators(TorchDispatchMode):
    """How many of aten's operators torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


class Data:
    fixed_length = True
    context = CONTEXT
    train = eval = test = predict = collate = None


def make_task() -> LanguageModel:
    spec = OptimizerSpec("AdamW", lr=1e-3, fused=False, options={"foreach": True})
    return LanguageModel(lambda: GPT(layers=2, context=CONTEXT, width=64, heads=2), Data(), spec)


def ours(comm: Communicator, batches: list[torch.Tensor]) -> Callable[[], None]:
    task, clip = make_task(), Clip(norm=1.0)
    plan = BatchPlan(MICRO * ACCUMULATE * RANKS, MICRO, ACCUMULATE, RANKS)
    job = Job(
        task=task,
        build_model=task.build_model,
        batch=plan,
        precision=Precision(compute="bf16"),
        clip=clip,
        ema_decay=0.99,
    )
    engine = DDP().prepare(job, comm)
    weight = float(MICRO * CONTEXT)
    work = [MicroBatch(batch, weight, 7) for batch in batches]

    def step() -> None:
        engine.zero_grad()
        engine.forward_backward(work, weight * ACCUMULATE * RANKS, task)
        engine.step(clip)

    return step


def by_hand(comm: Communicator, batches: list[torch.Tensor]) -> Callable[[], None]:
    task = make_task()
    model = task.build_model()
    module = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    averages = [parameter.detach().clone() for parameter in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        for number, batch in enumerate(batches, start=1):
            waits = contextlib.nullcontext() if number == len(batches) else module.no_sync()
            with waits:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = task.loss(task.forward(module, batch), batch)
                (loss / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        torch._foreach_lerp_(averages, list(model.parameters()), 0.01)

    return step


def count(comm: Communicator, make: Callable[..., Callable[[], None]]) -> int:
    tokens = torch.zeros(MICRO, CONTEXT + 1, dtype=torch.uint8)
    step = make(comm, [tokens] * ACCUMULATE)
    for _ in range(WARM):  # buckets are laid out anew after the first
        step()
    with Operators() as seen:
        step()
    return seen.count


def test_a_step_asks_for_the_operators_of_a_loop_by_hand_to_within_five_in_a_hundred() -> None:
    ranks = shared_pool(RANKS, "cpu", OPTIONS)
    for mine, bare in zip(ranks.run(count, ours), ranks.run(count, by_hand), strict=True):
        assert bare > 500
        assert mine <= 1.05 * bare, (mine, bare)
