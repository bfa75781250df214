"""Parameters of every dtype, shape and layout that torch trains, under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Clip, Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.compare import FP32, FP32_ADAM, close, same_tensors
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.state import fill, whole_state
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
        if kind == "empty":
            self.odd = nn.Parameter(torch.empty(0, 3))
        if kind == "bf16":
            self.odd = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        if kind == "transposed":
            weight = self.tiny.head.weight
            self.tiny.head.weight = nn.Parameter(weight.detach().t().contiguous().t())
        if kind == "gaps":
            weight = self.tiny.head.weight.detach()
            self.tiny.head.weight = nn.Parameter(torch.cat([weight, weight], 1)[:, ::2])
        if kind == "channels_last":
            self.mix = nn.Conv2d(1, 3, 3, padding=1)
            self.back = nn.Conv2d(3, 1, 3, padding=1)
            self.to(memory_format=torch.channels_last)
        if kind == "hook":
            self.tiny.head.weight.register_hook(lambda gradient: gradient * 2)
        if kind == "late hook":
            self.tiny.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        if kind == "holding hook":
            weight = self.tiny.head.weight
            weight.register_hook(lambda gradient: gradient * (weight > 0))
        if kind == "float64":
            self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tiny.embedding(tokens)
        if self.kind == "complex":
            turned = hidden * self.odd
            hidden = turned.real + turned.imag**2
        if self.kind == "empty":
            hidden = hidden + self.odd.sum()
        if self.kind in ("scalar", "bf16"):
            hidden = hidden * self.odd.float()
        if self.kind == "channels_last":
            hidden = hidden + self.back(torch.tanh(self.mix(hidden[:, None])))[:, 0]
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


def train(
    comm: Communicator, strategy: Strategy, scenario: Scenario, kind: str
) -> TrainingOutcome | str:
    """The outcome, or the words of what refused it before the first step."""
    task = OddTask(kind, scenario.optimizer)
    try:
        driver = cases.Driver(comm, strategy, scenario, task=task)
    except Unsupported as error:
        return str(error)
    outcome = TrainingOutcome()
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
    # Micro-batches are added up in the dtype of a gradient.
    rounding = 1e-2 if kind == "bf16" else FP32.parameters
    for outcome in shared_pool(ranks).run(train, strategy, scenario, kind):
        assert isinstance(outcome, TrainingOutcome), outcome
        for step, norm in enumerate(expected.norms):
            close(outcome.norms[step], norm, rounding, f"step {step}: gradient norm")
        same_tensors(outcome.parameters, expected.parameters, rounding, "parameters")


@pytest.mark.parametrize("kind", ["float64", "complex"])
@pytest.mark.parametrize("strategy", WHOLE, ids=str)
def test_wide_and_complex_parameters_are_clipped_by_their_norm(
    strategy: Strategy, kind: str
) -> None:
    if kind == "complex" and getattr(strategy, "zero1", False):
        for words in shared_pool(2).run(train, strategy, Scenario(), kind):
            assert "strategy.zero1=true takes parameters of one dtype" in words
            assert "torch.complex64, torch.float32" in words
        return
    equal_plain(strategy, kind)


@pytest.mark.parametrize("strategy", WHOLE, ids=str)
def test_float64_is_summed_in_float64(strategy: Strategy) -> None:
    ranks = 1 if isinstance(strategy, Single) else 2
    scenario = Scenario()
    expected = reference.train(scenario, ranks, task=OddTask("float64"))
    for outcome in shared_pool(ranks).run(train, strategy, scenario, "float64"):
        assert isinstance(outcome, TrainingOutcome), outcome
        same_tensors(outcome.parameters, expected.parameters, 1e-13, "parameters")


@pytest.mark.parametrize("strategy", WHOLE, ids=str)
def test_float64_is_clipped_by_value(strategy: Strategy) -> None:
    equal_plain(strategy, "float64", clip=Clip(value=0.02))


@pytest.mark.parametrize("strategy", [Single(), DDP(), Gloo()], ids=str)
def test_complex_parameters_have_no_bound_by_value(strategy: Strategy) -> None:
    ranks = 1 if isinstance(strategy, Single) else 2
    scenario = Scenario(clip=Clip(value=0.02))
    for words in shared_pool(ranks).run(train, strategy, scenario, "complex"):
        assert isinstance(words, str)
        assert "trainer.max_grad_value" in words
        assert "'odd'" in words


@pytest.mark.parametrize("strategy", [DDP(), DDP(overlap=False), Gloo()], ids=str)
def test_complex_gradients_are_not_cut_to_their_real_part_by_a_lower_dtype(
    strategy: Strategy,
) -> None:
    scenario = Scenario(precision=Precision(reduce="bf16"))
    expected = reference.train(scenario, 2, task=OddTask("complex"))
    for outcome in shared_pool(2).run(train, strategy, scenario, "complex"):
        assert isinstance(outcome, TrainingOutcome), outcome
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
    outcome = TrainingOutcome()
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
    for parameters in shared_pool(ranks).run(train_sparse, strategy, name):
        assert not isinstance(parameters, str), parameters
        same_tensors(parameters, expected, FP32.parameters, "parameters")


@pytest.mark.parametrize("strategy", [Single(), DDP()], ids=str)
def test_an_optimizer_without_a_sparse_step_is_refused_before_the_first(
    strategy: Strategy,
) -> None:
    for words in shared_pool(1 if strategy == Single() else 2).run(train_sparse, strategy, "adamw"):
        assert "optimizer AdamW cannot step a sparse gradient" in words
        assert "sparse=False" in words


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("late hook", "a hook on the parameter 'tiny.head.weight' that is called once"),
        ("holding hook", "a hook on the parameter 'tiny.head.weight' that holds a parameter"),
    ],
)
def test_fsdp_names_what_it_cannot_cut_before_the_first_step(kind: str, words: str) -> None:
    for said in shared_pool(2).run(train, FSDP(), Scenario(), kind):
        assert isinstance(said, str), "it was not refused"
        assert words in said
        assert "strategy=ddp" in said


@pytest.mark.parametrize("strategy", WHOLE[:5], ids=str)
@pytest.mark.parametrize("kind", ["scalar", "hook"])
def test_what_fsdp_cannot_cut_trains_elsewhere(strategy: Strategy, kind: str) -> None:
    equal_plain(strategy, kind, clip=Clip())


UNCUT = ["scalar", "empty", "complex", "bf16"]
SHARDED: list[Strategy] = [
    FSDP(wrap_min_bytes=0),
    FSDP(reshard_after_forward=False, reduce_every_micro_batch=True),
    FSDP(find_unused_parameters=True, wrap_modules=("Linear",)),
    FSDP(shard_size=1),
    FSDP(cpu_offload=True),
]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", UNCUT)
@pytest.mark.parametrize("strategy", SHARDED, ids=str)
def test_fsdp_keeps_whole_what_it_cannot_cut(strategy: Strategy, kind: str) -> None:
    equal_plain(strategy, kind, clip=Clip())
    equal_plain(strategy, kind, clip=Clip(norm=0.1))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", UNCUT)
@pytest.mark.parametrize("strategy", [FSDP(), DDP()], ids=str)
def test_what_is_not_cut_has_its_adamw_its_average_and_its_place_in_a_state(
    strategy: Strategy, kind: str
) -> None:
    scenario = Scenario(
        optimizer="adamw", clip=Clip(norm=0.1), ema_decay=0.5, data=TinyData(steps=4, accumulate=2)
    )
    expected = reference.train(scenario, 2, task=OddTask(kind, "adamw"))
    for other in (DDP(), FSDP()):
        outcomes = shared_pool(2).run(train_and_move, strategy, other, scenario, kind)
        for outcome in outcomes:
            bound = FP32_ADAM.parameters if kind != "bf16" else 1e-2
            same_tensors(outcome.parameters, expected.parameters, bound, "parameters")
            for name, slots in expected.optimizer["main"].items():
                same_tensors(outcome.optimizer["main"][name], slots, bound, name)
            for name, value in expected.averaged_metrics.items():
                close(outcome.averaged_metrics[name], value, bound, name)


def train_and_move(
    comm: Communicator, first: Strategy, second: Strategy, scenario: Scenario, kind: str
) -> TrainingOutcome:
    """Trains under one strategy, and the last two steps under another, from its state."""
    drivers = [
        cases.Driver(comm, strategy, scenario, task=OddTask(kind, scenario.optimizer))
        for strategy in (first, second)
    ]
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        if number == 2:
            saved = whole_state(drivers[0].engine.state_dict(), comm)
            template = drivers[1].engine.state_template()
            drivers[1].engine.load_state_dict(fill(template, saved))
        drivers[number // 2].step(number, outcome)
    return drivers[1].finish(outcome)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", ["transposed", "gaps", "channels_last", "float64"])
def test_fsdp_trains_other_layouts_and_dtypes(kind: str) -> None:
    equal_plain(FSDP(), kind)
    equal_plain(FSDP(wrap_modules=("Linear",)), kind)


@pytest.mark.parametrize("kind", ["transposed", "gaps", "channels_last"])
@pytest.mark.parametrize("strategy", WHOLE, ids=str)
def test_parameters_in_any_order_in_memory_train(strategy: Strategy, kind: str) -> None:
    equal_plain(strategy, kind)
