"""What training has changed, out of a native engine and into it again: a part of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torsh_trainer.optim.ema import Ema
from torsh_trainer.optim.loss_scaling import LossScaler
from torsh_trainer.strategies.base import GradientCompression
from torsh_trainer.strategies.buffers import Buffers
from torsh_trainer.strategies.state import (
    GroupNames,
    load_model,
    load_optimizers,
    materialise_slots,
    optimizer_state,
)
from torsh_trainer.strategies.trainability import Trainable


@dataclass(frozen=True)
class EngineState:
    """The parts of an engine that go into a checkpoint. ``names`` maps ``id(parameter)`` to its
    name, ``groups`` are the names in each group, where other processes hold some of them. See
    ``Engine.state_dict`` for the form."""

    model: nn.Module
    optimizers: Mapping[str, Optimizer]
    names: Mapping[int, str]
    trainable: Trainable
    buffers: Buffers
    scaler: LossScaler | None
    ema: Ema | None
    compression: GradientCompression | None
    groups: Mapping[str, GroupNames] | None = None

    def save(self) -> dict[str, Any]:
        """Everything that training has changed; collective."""
        self.buffers.gather()
        groups = self.groups or {}
        state: dict[str, Any] = {
            "model": dict(self.model.state_dict()),
            "optimizer": {
                name: optimizer_state(optimizer, self.names, groups.get(name))
                for name, optimizer in self.optimizers.items()
            },
        }
        if self.scaler is not None:
            state["loss_scale"] = self.scaler.state_dict()
        if self.ema is not None:
            state["ema"] = self.ema.state_dict()
        if self.compression is not None:
            state["compression"] = self.compression.state_dict()
        buffers = self.buffers.state_dict()
        if buffers:
            state["buffers"] = buffers
        trains = self.trainable.note()
        if trains:
            state["trains"] = trains
        return state

    def expect(self, saved: Mapping[str, Any]) -> None:
        """See ``Engine.expect``."""
        if self.compression is not None:
            self.compression.expect(saved.get("compression", {}))
        self.buffers.expect(saved.get("buffers", {}))

    def materialise(self) -> None:
        """Makes slots of optimizers that only a step would have made."""
        for optimizer in self.optimizers.values():
            materialise_slots(optimizer)

    def make_template(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state``, which ``save`` gave, for a checkpoint to fill."""
        if self.compression is not None:
            state["compression"] = self.compression.template()
        buffers = self.buffers.template()
        if buffers:
            state["buffers"] = buffers
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes what ``make_template`` gave, filled."""
        load_model(self.model, state["model"])
        load_optimizers(self.optimizers, state["optimizer"], self.names, self.groups)
        self.load_beside(state)
        if self.compression is not None:
            self.compression.load(state.get("compression", {}))
        self.buffers.load(state.get("buffers", {}))

    def load_beside(self, state: Mapping[str, Any]) -> None:
        """Of ``state`` the loss scale and the moving average."""
        if self.scaler is not None and "loss_scale" in state:
            self.scaler.load_state_dict(state["loss_scale"])
        if self.ema is not None and "ema" in state:
            self.ema.load_state_dict(state["ema"])
