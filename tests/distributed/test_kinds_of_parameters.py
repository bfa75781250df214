"""Parameters of every dtype, shape and layout that torch trains, under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.optimizers import OptimizerSpec
from torsh_trainer.precision import Precision
from torsh_trainer.strategies.base import Clip, Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.compare import FP32, close, same_tensors
from torsh_trainer.testing.ranks import shared
from torsh_trainer.testing.reference import Outcome, Scenario
from torsh_trainer.testing.tiny import WIDTH, TinyData, TinyModel, TinyTask

WHOLE = [
    Single(),
    DDP(),
    DDP(overlap=False),
    DDP(zero1=True),
    Gloo(),
    Gloo(overlap=False, zero1=True),
]
"""Strategies under which every process holds the whole model."""


class Odd(nn.Module):
    """The tiny model, with a parameter of some ``kind`` in its way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tiny = TinyModel(TinyTask().options)
        self.kind = kind
        draw = torch.Generator().manual_seed(1)
        if kind == "complex":
            values = torch.randn(WIDTH, dtype=torch.complex64, generator=draw)
            self.odd = nn.Parameter(values)
        if kind == "scalar":
            self.odd = nn.Parameter(torch.tensor(1.5))
        if kind == "bf16":
            self.odd = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        if kind == "transposed":
            weight = self.tiny.head.weight
            self.tiny.head.weight = nn.Parameter(weight.detach().t().contiguous().t())
        if kind == "hook":
            self.tiny.head.weight.register_hook(lambda gradient: gradient * 2)
        if kind == "float64":
            self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tiny.embedding(tokens)
        if self.kind == "complex":
            turned = hidden * self.odd
            hidden = turned.real + turned.imag**2
        if self.kind in ("scalar", "bf16"):
            hidden = hidden * self.odd.float()
        for block in self.tiny.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.tiny.head(self.tiny.norm(hidden))
        return logits


class OddTask(TinyTask):
    def __init__(self, kind: str, optimizer: Any = "sgd") -> None:
        super().__init__(optimizer=optimizer)
        self.kind = kind

    def build_model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Odd(self.kind)


def train(comm: Communicator, strategy: Strategy, scenario: Scenario, kind: str) -> Outcome | str:
    """The outcome, or the words of what refused it before the first step."""
    task = OddTask(kind, scenario.optimizer)
    try:
        driver = cases.Driver(comm, strategy, scenario, task=task)
    except Unsupported as error:
        return str(error)
    outcome = Outcome()
    for number in range(scenario.data.steps):
        driver.step(number, outcome)
    return driver.finish(outcome)


def equal_plain(
    strategy: Strategy, kind: str, *, clip: Clip = Clip(norm=0.1), optimizer: str = "sgd"
) -> None:
    ranks = 1 if isinstance(strategy, Single) else 2
    data = TinyData(accumulate=2)
    scenario = Scenario(clip=clip, optimizer=optimizer, data=data)
    expected = reference.train(scenario, ranks, task=OddTask(kind, optimizer))
    for outcome in shared(ranks).run(train, strategy, scenario, kind):
        assert isinstance(outcome, Outcome), outcome
        for step, norm in enumerate(expected.norms):
            close(outcome.norms[step], norm, FP32.relative, f"step {step}: gradient norm")
        same_tensors(outcome.parameters, expected.parameters, FP32.parameters, "parameters")


@pytest.mark.parametrize("kind", ["float64", "complex"])
@pytest.mark.parametrize("strategy", WHOLE, ids=str)
def test_wide_and_complex_parameters_are_clipped_by_their_norm(
    strategy: Strategy, kind: str
) -> None:
    if kind == "complex" and getattr(strategy, "zero1", False):
        for words in shared(2).run(train, strategy, Scenario(), kind):
            assert "strategy.zero1=true takes parameters of one dtype" in words
            assert "torch.complex64, torch.float32" in words
        return
    equal_plain(strategy, kind)


@pytest.mark.parametrize("strategy", WHOLE, ids=str)
def test_float64_is_summed_in_float64(strategy: Strategy) -> None:
    ranks = 1 if isinstance(strategy, Single) else 2
    scenario = Scenario()
    expected = reference.train(scenario, ranks, task=OddTask("float64"))
    for outcome in shared(ranks).run(train, strategy, scenario, "float64"):
        assert isinstance(outcome, Outcome), outcome
        same_tensors(outcome.parameters, expected.parameters, 1e-13, "parameters")


@pytest.mark.parametrize("strategy", WHOLE, ids=str)
def test_float64_is_clipped_by_value(strategy: Strategy) -> None:
    equal_plain(strategy, "float64", clip=Clip(value=0.02))


@pytest.mark.parametrize("strategy", [Single(), DDP(), Gloo()], ids=str)
def test_complex_parameters_have_no_bound_by_value(strategy: Strategy) -> None:
    ranks = 1 if isinstance(strategy, Single) else 2
    scenario = Scenario(clip=Clip(value=0.02))
    for words in shared(ranks).run(train, strategy, scenario, "complex"):
        assert isinstance(words, str)
        assert "trainer.max_grad_value" in words
        assert "'odd'" in words


@pytest.mark.parametrize("strategy", [DDP(), DDP(overlap=False), Gloo()], ids=str)
def test_complex_gradients_are_not_cut_to_their_real_part_by_a_lower_dtype(
    strategy: Strategy,
) -> None:
    scenario = Scenario(precision=Precision(reduce="bf16"))
    expected = reference.train(scenario, 2, task=OddTask("complex"))
    for outcome in shared(2).run(train, strategy, scenario, "complex"):
        assert isinstance(outcome, Outcome), outcome
        same_tensors(outcome.parameters, expected.parameters, 1e-2, "parameters")


class SparseTask(TinyTask):
    """The embedding's gradient is sparse; the optimizer is what a recipe would make."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.spec = OptimizerSpec(name, lr=0.1)

    def build_model(self) -> TinyModel:
        model = super().build_model()
        model.embedding.sparse = True
        return model

    def build_optimizers(self, named_parameters: Any) -> Any:
        return self.spec.build_all(named_parameters)


def train_sparse(comm: Communicator, strategy: Strategy, name: str) -> dict[str, Tensor] | str:
    """Parameters after three steps, or the words of what refused it before the first."""
    scenario = Scenario(clip=Clip(norm=0.1))
    try:
        driver = cases.Driver(comm, strategy, scenario, task=SparseTask(name))
    except Unsupported as error:
        return str(error)
    outcome = Outcome()
    for number in range(scenario.data.steps):
        driver.step(number, outcome)
    return driver.finish(outcome).parameters


@pytest.mark.parametrize("strategy", [Single(), DDP()], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_a_sparse_embedding_trains_with_the_optimizer_of_a_recipe(
    strategy: Strategy, name: str
) -> None:
    """As a dense one does: without momentum and decay the update is the same."""

    class Dense(SparseTask):
        def build_model(self) -> TinyModel:
            return TinyTask.build_model(self)

    ranks = 1 if strategy == Single() else 2
    expected = reference.train(Scenario(clip=Clip(norm=0.1)), ranks, task=Dense(name)).parameters
    for parameters in shared(ranks).run(train_sparse, strategy, name):
        assert not isinstance(parameters, str), parameters
        same_tensors(parameters, expected, FP32.parameters, "parameters")


@pytest.mark.parametrize("strategy", [Single(), DDP()], ids=str)
def test_an_optimizer_without_a_sparse_step_is_refused_before_the_first(
    strategy: Strategy,
) -> None:
    for words in shared(1 if strategy == Single() else 2).run(train_sparse, strategy, "adamw"):
        assert "optimizer AdamW cannot step a sparse gradient" in words
        assert "sparse=False" in words


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("scalar", "the parameter 'odd', without dimensions"),
        ("complex", "the parameter 'odd', complex"),
        ("bf16", "parameters of several dtypes in one unit"),
        ("hook", "the parameter 'tiny.head.weight', with a hook of its own"),
    ],
)
def test_fsdp_names_what_it_cannot_cut_before_the_first_step(kind: str, words: str) -> None:
    for said in shared(2).run(train, FSDP(), Scenario(), kind):
        assert isinstance(said, str), "it was not refused"
        assert words in said
        assert "strategy=ddp" in said


@pytest.mark.parametrize("strategy", WHOLE[:5], ids=str)
@pytest.mark.parametrize("kind", ["scalar", "hook"])
def test_what_fsdp_cannot_cut_trains_elsewhere(strategy: Strategy, kind: str) -> None:
    equal_plain(strategy, kind, clip=Clip())


@pytest.mark.parametrize("kind", ["transposed", "float64"])
def test_fsdp_trains_other_layouts_and_dtypes(kind: str) -> None:
    equal_plain(FSDP(), kind)
