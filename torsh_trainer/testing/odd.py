"""What plain PyTorch trains and an engine may get wrong without a word: one oddity at a time."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.testing import reference
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import VOCABULARY, WIDTH, TinyModel, TinyTask

Hook = Literal["clamp", "sign", "module_hook"]
Memory = Literal["transposed", "channels_last", "halves", "every_other"]
Overlap = Literal["overlap", "same"]
Gradient = Literal["penalty", "weighted_by_gradient", "penalty_of_parameters", "regularised"]
Repeat = Literal["repeated", "repeated_within", "repeated_later"]
Write = Literal["bounded", "bounded_data"]
Kind = Hook | Memory | Overlap | Gradient | Repeat | Write | Literal["accumulated", "moved"]

HOOKS: tuple[Kind, ...] = get_args(Hook)
"""Hooks that are no linear function of a gradient: on parameters, and on a module."""

MEMORY: tuple[Kind, ...] = get_args(Memory)
"""Parameters that are not contiguous, or views of one storage."""

OVERLAPS: tuple[Kind, ...] = get_args(Overlap)
"""Parameters of which a step of one moves another."""

GRADIENTS: tuple[Kind, ...] = get_args(Gradient)
"""Losses that take a gradient, or read the parameters."""

WRITES: tuple[Kind, ...] = get_args(Write)
"""Layers whose forward bounds their weight, in place or by another tensor for ``data``."""

REPEATS: tuple[Kind, ...] = get_args(Repeat)
"""A layer used again in a reentrant checkpoint: a backward adds to its gradient twice."""


class Features(nn.Module):
    """Two linear layers: (batch, length, vocabulary) of floats -> the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(torch.tanh(self.first(features)))
        return logits


class ChannelsLastConvolution(nn.Module):
    """A convolution whose weight is channels_last, over tokens as an image of one column."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        image = self.embedding(tokens).permute(0, 2, 1).unsqueeze(-1)
        hidden = torch.tanh(self.convolution(image)).squeeze(-1).permute(0, 2, 1)
        logits: Tensor = self.head(hidden)
        return logits


class Repeated(nn.Module):
    """A layer that is used twice, once of them in a reentrant checkpoint, from some call on."""

    def __init__(self, kind: str, first_call: int) -> None:
        super().__init__()
        within = kind == "repeated_within"
        width = WIDTH if within else VOCABULARY
        self.first = nn.Linear(VOCABULARY, width) if within else nn.Identity()
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.first_call = first_call if kind == "repeated_later" else 0
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        self.calls += 1
        hidden = F.one_hot(tokens, VOCABULARY).to(self.head.weight.dtype)
        hidden = torch.tanh(self.layer(self.first(hidden)))
        if self.calls > self.first_call:
            hidden = torch.tanh(checkpoint(self.layer, hidden, use_reentrant=True))
        logits: Tensor = self.head(hidden)
        return logits


class Bounded(nn.Linear):
    """A linear layer that bounds its rows in training, as EEGNet's do."""

    replaces = False

    def forward(self, inputs: Tensor) -> Tensor:
        """As ``nn.Linear``."""
        if self.training:
            with torch.no_grad():
                bounded = torch.renorm(self.weight, 2, 0, 0.2)
                if self.replaces:
                    self.weight.data = bounded
                else:
                    self.weight.copy_(bounded)
        return super().forward(inputs)


class OddTask(TinyTask):
    """The tiny task with one oddity; ``first_call`` is that of a repetition that begins later."""

    def __init__(self, kind: Kind, *, first_call: int = 0) -> None:
        super().__init__()
        self.kind = kind
        self.first_call = first_call
        self.extra: Tensor | float = 0.0

    def build_model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if self.kind in ("penalty", "weighted_by_gradient"):
                return Features()
            if self.kind == "channels_last":
                return ChannelsLastConvolution()
            if self.kind in REPEATS:
                return Repeated(self.kind, self.first_call)
            return _make_odd(super().build_model(), self.kind)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        if not torch.is_grad_enabled():
            self.extra = 0.0
        if self.kind in ("penalty", "weighted_by_gradient"):
            return self._by_features(model, batch["tokens"])
        logits = model(batch["tokens"])
        if torch.is_grad_enabled() and self.kind == "regularised":
            self.extra = 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()
        if torch.is_grad_enabled() and self.kind == "penalty_of_parameters":
            loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            self.extra = 0.1 * torch.stack([slope.square().sum() for slope in gradients]).sum()
        return logits

    def _by_features(self, model: nn.Module, tokens: Tensor) -> Tensor:
        features = F.one_hot(tokens, VOCABULARY).float().requires_grad_(True)
        logits: Tensor = model(features)
        if torch.is_grad_enabled():
            penalised = self.kind == "penalty"
            (slope,) = torch.autograd.grad(
                logits.square().sum(), features, create_graph=penalised, retain_graph=True
            )
            penalty = 0.01 * (slope.square().sum(-1) - 1).square().mean()
            self.extra = penalty if penalised else penalty.detach() * logits.square().mean()
        return logits

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, batch) + self.extra


def _make_odd(model: TinyModel, kind: str) -> TinyModel:
    blocks: list[Any] = list(model.blocks)
    first, second = blocks[0].linear, blocks[1].linear
    if kind == "clamp":
        model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    elif kind == "sign":
        first.weight.register_hook(lambda gradient: gradient.sign() * 0.01)
    elif kind == "module_hook":
        model.norm.register_full_backward_hook(_clamp_gradient)
    elif kind == "accumulated":
        model.head.weight.register_post_accumulate_grad_hook(_halve)
    elif kind == "transposed":
        first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())
    elif kind in WRITES:
        for block in blocks:
            block.linear.__class__ = Bounded
            block.linear.replaces = kind == "bounded_data"
    elif kind == "moved":
        model.norm.bias.requires_grad_(False)
        model.norm.register_forward_hook(_move_bias)
    elif kind in ("halves", "every_other"):
        base = torch.randn(2 * WIDTH)
        halves = (base[:WIDTH], base[WIDTH:])
        one, other = halves if kind == "halves" else (base[::2], base[1::2])
        first.bias, second.bias = nn.Parameter(one), nn.Parameter(other)
    elif kind == "overlap":
        base = torch.randn(WIDTH + 3)
        first.bias, second.bias = nn.Parameter(base[:WIDTH]), nn.Parameter(base[3:])
    elif kind == "same":
        first.bias = nn.Parameter(second.bias.data)
    return model


def _clamp_gradient(_: nn.Module, into: Any, __: Any) -> tuple[Tensor]:
    return (into[0].clamp(-0.01, 0.01),)


def _move_bias(norm: Any, inputs: Any, _: Any) -> None:
    if norm.training:
        norm.bias.data.lerp_(inputs[0].detach().mean((0, 1)), 0.1)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


def train_odd(
    comm: Communicator, strategy: Strategy, scenario: Scenario, task: OddTask
) -> TrainingOutcome | str:
    """The outcome, or the words of what refused it, and in which step."""
    outcome = TrainingOutcome()
    try:
        driver = Driver(comm, strategy, scenario, task=task)
    except Unsupported as error:
        return f"step 0: {error}"
    for number in range(scenario.data.steps):
        try:
            driver.step(number, outcome)
        except Unsupported as error:
            comm.barrier()  # a library that one rank lets go of may end in the others
            driver.engine.close()
            return f"step {number}: {error}"
    return driver.finish(outcome)


PLAIN = Scenario()


def check_plain(pool: RankPool, strategy: Strategy, kind: Kind, scenario: Scenario = PLAIN) -> None:
    """Holds an engine against plain PyTorch."""
    size = pool.world_size
    calls = scenario.data.accumulate
    expected = reference.train(scenario, size, task=OddTask(kind, first_call=calls * size))
    for found in pool.run(train_odd, strategy, scenario, OddTask(kind, first_call=calls)):
        assert isinstance(found, TrainingOutcome), found
        same_tensors(found.parameters, expected.parameters, FP32.parameters, "parameters")


def check_refused(
    pool: RankPool,
    strategy: Strategy,
    kind: Kind,
    *words: str,
    scenario: Scenario = PLAIN,
) -> None:
    """Holds that every rank refuses, by ``words``, in the first step in which the oddity is."""
    begins = 1 if kind == "repeated_later" else 0
    task = OddTask(kind, first_call=scenario.data.accumulate)
    for found in pool.run(train_odd, strategy, scenario, task):
        assert isinstance(found, str), "it was trained"
        for word in (f"step {begins}: ", *words):
            assert word in found, found
