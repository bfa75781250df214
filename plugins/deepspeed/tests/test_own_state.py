"""Modules whose state_dict gives copies, or more than tensors: their own loading is what counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torsh_trainer_deepspeed import DeepSpeed

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.base import Communicator
from torsh_trainer.precision import Precision
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.ranks import shared
from torsh_trainer.testing.reference import Outcome, Scenario
from torsh_trainer.testing.state import whole_state
from torsh_trainer.testing.tiny import TinyModel, TinyModelOptions, TinyTask


class Extra(TinyModel):
    """``factor`` is no parameter, and travels as extra state."""

    def __init__(self, options: TinyModelOptions) -> None:
        super().__init__(options)
        self.factor = 1.0 + options.seed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.factor

    def get_extra_state(self) -> Any:
        return {"factor": self.factor, "sum": torch.tensor([self.factor])}

    def set_extra_state(self, state: Any) -> None:
        self.factor = state["factor"]


class ExtraTensor(Extra):
    """Its extra state is a tensor."""

    def get_extra_state(self) -> Any:
        return torch.tensor(self.factor)

    def set_extra_state(self, state: Any) -> None:
        self.factor = float(state)


class Copying(Extra):
    """A hook copies what it gives; some of it does not train."""

    def __init__(self, options: TinyModelOptions) -> None:
        super().__init__(options)
        self.embedding.requires_grad_(False)
        self.register_state_dict_post_hook(_copy)


class Packed(TinyModel):
    """Saves its last norm as one tensor, and takes it apart again."""

    def __init__(self, options: TinyModelOptions) -> None:
        super().__init__(options)
        self.norm = PackedNorm(self.norm)


class PackedNorm(nn.Module):
    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.bias = nn.Parameter(norm.bias.detach().clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (hidden.shape[-1],)
        return nn.functional.layer_norm(hidden, shape, self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "both"] = torch.stack([self.weight.detach(), self.bias.detach()])

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[prefix + "both"][0])
            self.bias.copy_(state[prefix + "both"][1])


def _copy(module: nn.Module, state: Any, prefix: str, local: Any) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.clone()


KINDS = (Extra, ExtraTensor, Copying, Packed)


class OwnTask(TinyTask):
    kind: type[TinyModel] = Copying

    def build_model(self) -> TinyModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            return self.kind(self.options)


@dataclass(frozen=True)
class OwnScenario(Scenario):
    kind: type[TinyModel] = Copying

    @property
    def task(self) -> TinyTask:
        task = OwnTask(self.model, self.optimizer)
        task.kind = self.kind
        return task


def save_and_go_on(
    comm: Communicator, strategy: DeepSpeed, scenario: OwnScenario, folder: Path
) -> tuple[Outcome, Outcome, dict[str, Any]]:
    """An engine that goes on, another that has taken its checkpoint, and the model saved."""
    first = Driver(comm, strategy, scenario)
    for number in range(2):
        first.step(number, Outcome())
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
    outcomes = Outcome(), Outcome()
    for driver, outcome in zip((first, second), outcomes, strict=True):
        driver.step(2, outcome)
        driver.finish(outcome)
    return *outcomes, saved


def same(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.metrics == other.metrics
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other.parameters[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_reaches_a_model_by_its_own_loading(
    stage: int, kind: type[TinyModel], tmp_path: Path
) -> None:
    scenario = OwnScenario(kind=kind, optimizer="adamw")
    pool = shared(2)
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
    for went_on, resumed, saved in shared(2).run(
        save_and_go_on, DeepSpeed(stage=stage), scenario, tmp_path
    ):
        same(went_on, resumed)
        weight = saved["head.weight"]
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, weight.bfloat16().float())
