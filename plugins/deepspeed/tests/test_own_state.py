"""Modules whose state_dict gives copies, or more than tensors: their own loading is what counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torsh_trainer_deepspeed import DeepSpeed

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.base import Communicator
from torsh_trainer.optim.precision import Precision
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.own_state import KINDS, Copying, OwnScenario
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import TrainingOutcome
from torsh_trainer.testing.state import whole_state
from torsh_trainer.testing.tiny import TinyModel, TinyModelOptions


def save_and_go_on(
    comm: Communicator, strategy: DeepSpeed, scenario: OwnScenario, folder: Path
) -> tuple[TrainingOutcome, TrainingOutcome, dict[str, Any]]:
    """An engine that goes on, another that has taken its checkpoint, and the model saved."""
    first = Driver(comm, strategy, scenario)
    for number in range(2):
        first.step(number, TrainingOutcome())
    checkpointer = DcpCheckpointer(folder, comm, CheckpointOptions())
    state = first.engine.state_dict()
    path = checkpointer.save(2, {"engine": state}, {})
    saved = whole_state(state, comm)["model"]
    other = OwnScenario(
        TinyModelOptions(seed=7),
        kind=scenario.kind,
        optimizer=scenario.optimizer,
        precision=scenario.precision,
    )
    second = Driver(comm, strategy, other)
    template = {"engine": second.engine.state_template()}
    second.engine.load_state_dict(checkpointer.load(template, path=path)["engine"])
    checkpointer.close()
    outcomes = TrainingOutcome(), TrainingOutcome()
    for driver, outcome in zip((first, second), outcomes, strict=True):
        driver.step(2, outcome)
        driver.finish(outcome)
    return *outcomes, saved


def same(one: TrainingOutcome, other: TrainingOutcome) -> None:
    assert one.losses == other.losses
    assert one.metrics == other.metrics
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other.parameters[name]), name


@pytest.mark.matrix(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_reaches_a_model_by_its_own_loading(
    stage: int, kind: type[TinyModel], tmp_path: Path
) -> None:
    scenario = OwnScenario(kind=kind, optimizer="adamw")
    pool = shared_pool(2)
    for went_on, resumed, saved in pool.run(
        save_and_go_on, DeepSpeed(stage=stage), scenario, tmp_path
    ):
        same(went_on, resumed)
        plain = scenario.task.build_model()
        plain.load_state_dict(saved)  # strictly: what was saved is what the module takes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_are_of_the_masters_where_parameters_are_rounded(stage: int, tmp_path: Path) -> None:
    low = Precision(params="bf16", compute="bf16")
    scenario = OwnScenario(kind=Copying, optimizer="adamw", precision=low)
    for went_on, resumed, saved in shared_pool(2).run(
        save_and_go_on, DeepSpeed(stage=stage), scenario, tmp_path
    ):
        same(went_on, resumed)
        weight = saved["head.weight"]
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, weight.bfloat16().float())
