"""Forwards that write to parameters where nothing is lost by it: named once, in any process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import TinyModel, TinyTask


class Shrinks(nn.Linear):
    """Halves its weight in every forward of an evaluation."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(inputs)


class ShrinkingTask(TinyTask):
    def build_model(self) -> TinyModel:
        model = super().build_model()
        model.head.__class__ = Shrinks
        return model


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: Any) -> None:
        self.said.append(record.getMessage())


def evaluate(comm: Communicator, strategy: Strategy) -> tuple[TrainingOutcome | str, list[str]]:
    """An evaluation without training (or what refuses it), and what the log says."""
    driver = cases.Driver(comm, strategy, Scenario(), task=ShrinkingTask())
    kept = Kept()
    log = logging.getLogger("torsh_trainer.strategies.writes")
    log.addHandler(kept)
    try:
        return driver.finish(TrainingOutcome()), kept.said
    except Unsupported as error:
        return str(error), kept.said
    finally:
        log.removeHandler(kept)


@pytest.mark.parametrize("strategy", [DDP(), Gloo()], ids=str)
def test_it_is_told_once_where_processes_have_their_own(strategy: Strategy) -> None:
    for found, said in shared_pool(2).run(evaluate, strategy):
        assert isinstance(found, TrainingOutcome)
        assert len(said) == 1
        assert "evaluation writes to the parameter 'head.weight'" in said[0]
        assert "if self.training" in said[0]


@pytest.mark.parametrize("strategy", [FSDP(), FSDP(reshard_after_forward=False)], ids=str)
def test_it_is_refused_where_it_would_be_lost(strategy: Strategy) -> None:
    for found, _ in shared_pool(2).run(evaluate, strategy):
        assert isinstance(found, str)
        assert "strategy=fsdp cannot honour a forward that writes to the parameter 'head." in found


def test_one_process_does_it_as_plain_pytorch_without_a_word() -> None:
    task = ShrinkingTask()
    plain = task.build_model().eval()
    with torch.no_grad():
        items = [item for rank in Scenario().data.evaluation(1) for item in rank]
        every = [(task.evaluate(plain, item[0])["loss"], item[1]) for item in items]
    parts = [part for part, counts in every if counts]
    ((found, said),) = shared_pool(1).run(evaluate, Single())
    assert isinstance(found, TrainingOutcome)
    expected = sum(float(part.total) for part in parts) / sum(float(part.weight) for part in parts)
    assert found.metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert said == []


def test_a_model_that_writes_nothing_is_evaluated_without_a_word() -> None:
    scenario = Scenario()
    expected = reference.train(scenario, 2).metrics
    for found, said in shared_pool(2).run(train_listening, scenario):
        assert found == pytest.approx(expected, rel=1e-5)
        assert said == []


def train_listening(comm: Communicator, scenario: Scenario) -> tuple[dict[str, float], list[str]]:
    kept = Kept()
    log = logging.getLogger("torsh_trainer.strategies.writes")
    log.addHandler(kept)
    try:
        return cases.train(comm, FSDP(), scenario).metrics, kept.said
    finally:
        log.removeHandler(kept)


class ShrinksWhileTraining(nn.Linear):
    """Multiplies its weight by 0.9 in every training forward: twice is not once."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(inputs)


class TaskThatShrinks(TinyTask):
    def build_model(self) -> TinyModel:
        model = super().build_model()
        model.head.__class__ = ShrinksWhileTraining
        return model


def train_shrinking(comm: Communicator, strategy: Strategy) -> list[str]:
    kept = Kept()
    log = logging.getLogger("torsh_trainer.strategies.writes")
    log.addHandler(kept)
    try:
        driver = cases.Driver(comm, strategy, Scenario(), task=TaskThatShrinks())
        outcome = TrainingOutcome()
        for number in range(driver.scenario.data.steps):
            driver.step(number, outcome)
        return kept.said
    finally:
        log.removeHandler(kept)


@pytest.mark.parametrize("strategy", [DDP(), Gloo()], ids=str)
def test_a_training_forward_that_depends_on_how_often_it_runs_is_named(strategy: Strategy) -> None:
    for said in shared_pool(2).run(train_shrinking, strategy):
        assert len(said) == 1
        assert "a training forward writes to the parameter 'head.weight'" in said[0]
        assert "trainer.accumulate" in said[0]


def find_refusal(comm: Communicator, strategy: Strategy) -> str:
    compile = {"backend": "eager"}
    driver = cases.Driver(comm, strategy, Scenario(), task=TaskThatShrinks(), compile=compile)
    try:
        for number in range(2):
            driver.step(number, TrainingOutcome())
    except Unsupported as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("strategy", [FSDP(), FSDP(wrap_min_bytes=0)], ids=str)
def test_a_compiled_forward_that_writes_to_a_gathered_copy_is_refused_too(
    strategy: Strategy,
) -> None:
    for words in shared_pool(2).run(find_refusal, strategy):
        assert "strategy=fsdp cannot honour a forward that writes to the parameter 'head.w" in words
