"""A module that FSDP2 has cut, given back as its author wrote it: whole, on the CPU, of its class.

Scripts save it, train it in another Trainer, call it on one process alone. The engine keeps its
shards and its optimizers, for a checkpoint or a test afterwards, which takes the module up again.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.tensor import DTensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer_lightning import whole

_MARKS = ("__composable_api_", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What FSDP2 writes into a module beside its hooks, by how the names begin."""
_STATES: Any = _composable_state._module_state_mapping
"""What torch knows of every module that it has cut."""
_ENGINES = ("torch.distributed.fsdp", "torsh_trainer.strategies")
"""Where hooks of the engine are from."""


def fits(module: nn.Module, comm: Communicator) -> bool:
    """Whether every process can hold the whole of ``module`` in its host's memory; collective."""
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    available = _available_bytes()
    short = available is not None and size * comm.world.local_size > available
    return not comm.reduce_values([float(short)], op="max")[0]


def _available_bytes() -> int | None:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


class GivenBack:
    """Makes ``module`` plain and whole; ``take`` cuts it again, with the weights that it has then.

    To make one is collective.
    """

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        self._marked: list[tuple[nn.Module, type[nn.Module], dict[str, Any], Any]] = []
        self._hooks: list[tuple[dict[int, Any], list[tuple[int, Any]], bool]] = []
        self._tensors: list[tuple[dict[str, Any], str, Tensor]] = []
        found: dict[Tensor, Tensor] = {}
        for part in module.modules():
            for p in part._parameters.values():
                if p is not None and p not in found:
                    found[p] = nn.Parameter(_whole(p, comm), requires_grad=p.requires_grad)
            for buffer in part._buffers.values():
                if buffer is not None and buffer.device.type != "cpu":
                    found.setdefault(buffer, buffer.cpu())
        for part in module.modules():
            for place in (part._parameters, part._buffers):
                self._replace(cast(dict[str, Any], place), found)
            self._unmark(part)

    def _replace(self, place: dict[str, Any], found: dict[Tensor, Tensor]) -> None:
        for name, tensor in place.items():
            if tensor is not None and tensor in found:
                self._tensors.append((place, name, tensor))
                place[name] = found[tensor]

    def _unmark(self, part: nn.Module) -> None:
        own = vars(part)
        for slot, hooks in own.items():
            if not slot.endswith("hooks") or not isinstance(hooks, dict):
                continue
            theirs = [(key, hook) for key, hook in hooks.items() if _is_engines(hook)]
            for key, _ in theirs:
                del hooks[key]
            if theirs:
                self._hooks.append((hooks, theirs, slot.endswith("pre_hooks")))
        kind = type(part)
        marks = {name: own.pop(name) for name in list(own) if name.startswith(_MARKS)}
        if marks:
            self._marked.append((part, kind, marks, _STATES.pop(part, None)))
        if kind.__bases__[0].__name__ == "FSDPModule":
            part.__class__ = kind.__bases__[1]

    def take(self) -> bool:
        """The module in its engine again, with rank 0's weights; collective.

        False, and nothing is changed, where the module is another by now.
        """
        for place, name, before in self._tensors:
            now = place.get(name)
            if now is None or now.shape != before.shape or whole.is_cut(now):
                return False
        for place, name, before in self._tensors:
            now = self._comm.to_device(place[name].detach())
            self._comm.broadcast(now, src=0)
            with torch.no_grad():
                before.copy_(whole.cut(now, before))
            before.requires_grad_(place[name].requires_grad)
            place[name] = before
        for hooks, theirs, first in self._hooks:
            kept = list(hooks.items())
            hooks.clear()
            hooks.update([*theirs, *kept] if first else [*kept, *theirs])
        for part, kind, marks, state in self._marked:
            vars(part).update(marks)
            part.__class__ = kind
            if state is not None:
                _STATES[part] = state
        return True


def _whole(p: Tensor, comm: Communicator) -> Tensor:
    value = p.detach()
    if isinstance(value, DTensor):
        value = cast(DTensor, value.to(comm.device)).full_tensor()
    return value.to("cpu", copy=True)


def _is_engines(hook: Any) -> bool:
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(hook, "__module__", "")).startswith(_ENGINES)
