"""Forwards of an evaluation that write to parameters: lost where copies are seen, else told."""

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
