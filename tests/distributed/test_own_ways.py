"""Tasks that go their own way within a step: models of their own, parameters left out later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.ranks import RankPool, shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import TinyData, TinyModel, TinyModelOptions, TinyTask


class OwnModel(TinyTask):
    """Keeps the model that it built, and calls that."""

    def build_model(self) -> TinyModel:
        self.model = super().build_model()
        return self.model

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return self.model(batch["tokens"])


def train(
    comm: Communicator, strategy: Strategy, scenario: Scenario, task: TinyTask
) -> TrainingOutcome:
    driver = cases.Driver(comm, strategy, scenario, task=task)
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        driver.step(number, outcome)
    return driver.finish(outcome)


@pytest.mark.parametrize(
    "strategy",
    [
        DDP(),
        DDP(find_unused_parameters=True),
        DDP(gradient_as_bucket_view=False),
        DDP(overlap=False),
        DDP(zero1=True),
        Gloo(),
        FSDP(wrap_min_bytes=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_task_that_calls_its_own_model_equals_plain_pytorch(
    strategy: Strategy, accumulate: int
) -> None:
    scenario = Scenario(data=TinyData(accumulate=accumulate))
    expected = reference.train(scenario, 2).parameters
    for outcome in shared_pool(2).run(train, strategy, scenario, OwnModel()):
        same_tensors(outcome.parameters, expected, FP32.parameters, "parameters")


class LeavesOut(TinyTask):
    """A layer takes part in the first step alone."""

    def __init__(self) -> None:
        super().__init__(TinyModelOptions(unused=True), "adamw")
        self.forwards = 0

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch["tokens"])

    def build_model(self) -> TinyModel:
        model = super().build_model()
        original = model.norm.forward

        def forward(hidden: Tensor) -> Tensor:
            self.forwards += 1
            hidden = original(hidden)
            return hidden + model.unused(hidden) if self.forwards <= self.first else hidden

        model.norm.forward = forward  # type: ignore[method-assign]
        return model

    first = 1


def until_refused(comm: Communicator, strategy: Strategy) -> tuple[int, str, bool]:
    """The step that raised a ConfigError, its words, and whether the layer moved in it."""
    driver = cases.Driver(comm, strategy, Scenario(data=TinyData(steps=4)), task=LeavesOut())
    layer = driver.engine.model.unused.weight
    for step in range(4):
        before = layer.detach().clone()
        try:
            driver.step(step, TrainingOutcome())
        except ConfigError as error:
            return step, str(error), not torch.equal(layer, before)
    return 4, "", False


@pytest.mark.parametrize("strategy", [DDP(), DDP(overlap=False), Gloo()], ids=str)
def test_a_parameter_left_out_from_a_later_step_on_is_named(strategy: Strategy) -> None:
    for step, words, moved in shared_pool(2).run(until_refused, strategy):
        assert step == 1
        assert "2 parameters got no gradient: unused.weight, unused.bias" in words
        assert "strategy.find_unused_parameters=true" in words
        assert not moved


@pytest.mark.parametrize(
    "strategy",
    [
        DDP(find_unused_parameters=True),
        DDP(overlap=False, find_unused_parameters=True),
        Gloo(find_unused_parameters=True),
        FSDP(),
        FSDP(find_unused_parameters=True),
    ],
    ids=str,
)
def test_a_parameter_left_out_from_a_later_step_on_stays(strategy: Strategy) -> None:
    scenario = Scenario(data=TinyData(steps=4))

    class Plain(LeavesOut):
        first = 2  # one process makes the forwards of both ranks

    expected = reference.train(scenario, 2, task=Plain()).parameters
    for outcome in shared_pool(2).run(train, strategy, scenario, LeavesOut()):
        same_tensors(outcome.parameters, expected, 1e-3, "parameters")


def test_a_static_graph_without_overlap_leaves_an_unused_parameter_alone() -> None:
    scenario = Scenario(model=TinyModelOptions(unused=True), optimizer="adamw")
    before = scenario.task.build_model().state_dict()
    strategy = DDP(static_graph=True, overlap=False)
    for outcome in shared_pool(2).run(train, strategy, scenario, scenario.task):
        assert torch.equal(outcome.parameters["unused.weight"], before["unused.weight"])


class Slip(RuntimeError):
    """What a hook of the user's raises."""


def slipping(comm: Communicator, strategy: Strategy, where: str) -> str:
    """What a step ends with when a hook raises in its backward: class and words."""

    class Slipping(TinyTask):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            if where == "output":
                outputs.register_hook(slip)
            return super().loss(outputs, batch)

        def build_model(self) -> TinyModel:
            model = super().build_model()
            if where == "module":
                model.norm.register_full_backward_hook(lambda *_: slip(None))
            return model

    def slip(_: Any) -> None:
        raise Slip("the hook's own words")

    driver = cases.Driver(comm, strategy, Scenario(), task=Slipping())
    try:
        driver.step(0, TrainingOutcome())
    except BaseException as error:  # noqa: BLE001 - which one it is, is what is asked
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "strategy",
    [DDP(), DDP(overlap=False), DDP(find_unused_parameters=True), Gloo(), FSDP()],
    ids=str,
)
@pytest.mark.parametrize("where", ["output", "module"])
def test_what_a_hook_raises_comes_through(strategy: Strategy, where: str) -> None:
    with RankPool(2) as pool:
        assert pool.run(slipping, strategy, where) == ["Slip: the hook's own words"] * 2
