"""What an engine holds of a module and its optimizers, as Lightning has it in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Engine
from torsh_trainer_lightning import whole


@dataclass(frozen=True)
class ModuleState:
    """An engine's ``module``, and the optimizers that its author knows, by the engine's names.

    Every method is collective. What is cut over ranks comes whole on rank 0 and is empty on others.
    """

    engine: Engine
    comm: Communicator
    module: nn.Module
    optimizers: Mapping[str, Optimizer]

    def plainly(self, name: str) -> bool:
        """Whether every rank's optimizer of that name has the whole state itself."""
        engine = self.engine
        return engine.whole_optimizers and engine.optimizers[name] is self.optimizers[name]

    def whole_state(self, name: str) -> bool:
        """Whether the state that the engine steps by is the optimizer's own, whole everywhere."""
        engine = self.engine
        own = engine.optimizers[name].state is self.optimizers[name].state
        return engine.whole_optimizers and own

    # -- the module ------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """The module's state with whole tensors."""
        state: dict[str, Any] = self.module.state_dict()
        held = self.engine.state_dict()["model"]
        if not self._apart(state, held):
            return state
        found = whole.gather_slots({name: {"": value} for name, value in held.items()}, self.comm)
        if not self.comm.world.is_rank_zero:
            return {}
        return {name: found[name][""] if name in found else state[name] for name in state}

    def load_module(self, saved: Mapping[str, Any], *, strict: bool) -> None:
        """Loads whole tensors, each rank its part.

        Raises:
            ConfigError: names differ, with ``strict``, where the module is cut over ranks.
        """
        state = self.module.state_dict()
        template = self.engine.state_template()
        if not self._apart(state, template["model"]):
            self.module.load_state_dict(saved, strict=strict)
            return
        odd = sorted(set(saved) ^ set(state))
        if odd and strict:
            raise ConfigError(
                f"the checkpoint and the module differ in {len(odd)} tensors, {odd[0]!r} among "
                "them",
                fix="load it into the module that was saved, or without strict",
            )
        model = {
            name: whole.cut(saved[name], held) if name in saved else held
            for name, held in template["model"].items()
        }
        self.engine.load_state_dict({**template, "model": model})

    def _apart(self, state: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
        """Whether, on any rank, what the engine holds is something else than the module's own."""
        mine = any(
            whole.is_cut(value)
            or (isinstance(value, Tensor) and state[name].data_ptr() != value.data_ptr())
            for name, value in held.items()
            if name in state
        )
        return bool(self.comm.reduce_values([float(mine)], op="max")[0])

    # -- optimizers ------------------------------------------------------------------------------

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """The state of the optimizer called ``name``, as torch writes it."""
        if self.whole_state(name):
            return self.optimizers[name].state_dict()
        held = self.engine.state_dict()["optimizer"][name]
        state = whole.gather_slots(held["state"], self.comm)
        return whole.as_torch(held["groups"], state) if self.comm.world.is_rank_zero else {}

    def load_optimizers(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes states as torch writes them, by the engine's names, each rank its part.

        Raises:
            ConfigError: the groups of one are others than these.
        """
        if all(map(self.plainly, states)):
            for name, saved in states.items():
                self.optimizers[name].load_state_dict(dict(saved))
                _optimizer_to_device(self.optimizers[name], self.comm.device)
            return
        template = self.engine.state_template()
        loaded = dict(template["optimizer"])
        for name, state in states.items():
            held = template["optimizer"][name]
            saved = whole.by_name(state, held["groups"])
            loaded[name] = {
                "state": _cut(saved["state"], held["state"]),
                "groups": saved["groups"],
            }
        self.engine.load_state_dict({**template, "optimizer": loaded})

    # -- the compression of gradients ------------------------------------------------------------

    def compression(self) -> dict[str, Any]:
        """What it keeps, with what every rank still owes; empty where nothing is compressed."""
        if self.engine.compression is None:
            return {}
        kept = self.engine.compression.state_dict()
        owed = {name: {"": value} for name, value in kept.get("residual", {}).items()}
        found = whole.gather_slots(owed, self.comm)
        if not self.comm.world.is_rank_zero:
            return {}
        shared = {name: value.cpu().clone() for name, value in kept.get("shared", {}).items()}
        return {**kept, "residual": {n: one[""] for n, one in found.items()}, "shared": shared}

    def load_compression(self, saved: Mapping[str, Any]) -> None:
        """Takes what ``compression`` gave, on this or another number of ranks."""
        if self.engine.compression is None:
            return
        self.engine.compression.expect(saved)
        template = self.engine.compression.template()
        filled = {
            kind: {
                name: whole.cut(saved[kind][name], like)
                for name, like in template.get(kind, {}).items()
                if name in saved[kind]
            }
            for kind in ("residual", "shared")
        }
        self.engine.compression.load({**saved, **filled})


def _cut(
    saved: Mapping[str, Mapping[str, Any]], held: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """This rank's part of an optimizer's state, by parameter and slot."""
    return {
        parameter: {
            slot: whole.cut(saved[parameter][slot], like)
            for slot, like in slots.items()
            if slot in saved[parameter]
        }
        for parameter, slots in held.items()
        if parameter in saved
    }


def is_apart(module: nn.Module) -> bool:
    """Whether parameters of a module are cut over processes."""
    return any(whole.is_cut(p) or _is_empty(p) for p in module.parameters())


def _is_empty(parameter: Any) -> bool:
    """Whether stage 3 of DeepSpeed, which notes its shape, has taken a parameter apart."""
    return getattr(parameter, "ds_shape", parameter.shape) != parameter.shape
