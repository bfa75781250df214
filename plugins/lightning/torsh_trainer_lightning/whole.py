"""Whole tensors of what an engine has cut over processes, and the cuts of whole tensors again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError

Slots = Mapping[str, Mapping[str, Any]]
"""Values by name and slot, as ``Engine.state_dict`` has them of an optimizer."""


def is_cut(value: Any) -> bool:
    """Whether a value of an engine's state is a part of something."""
    return isinstance(value, DTensor | FlatShard)


def gather_slots(slots: Slots, comm: Communicator) -> dict[str, dict[str, Any]]:
    """Every value whole, on the CPU of rank 0; other ranks get nothing. Collective.

    Ranks may hold other names; what several hold whole is the same on all of them.
    """
    mine = {(name, slot): value for name, values in slots.items() for slot, value in values.items()}
    told = comm.all_gather_object({key: _kind(value) for key, value in mine.items()})
    found: dict[tuple[str, str], Any] = {}
    for key in dict.fromkeys(key for ranks in told for key in ranks):
        kinds, value = {ranks.get(key) for ranks in told}, mine.get(key)
        if "mesh" in kinds:
            found[key] = cast(DTensor, value).full_tensor()
        elif kinds == {"whole"}:
            found[key] = value
        else:
            found[key] = _assemble(comm.all_gather_object(_as_sent(value)))
    if not comm.world.is_rank_zero:
        return {}
    whole: dict[str, dict[str, Any]] = {}
    for (name, slot), value in found.items():
        whole.setdefault(name, {})[slot] = _on_cpu(value)
    return whole


def _kind(value: Any) -> str:
    if isinstance(value, DTensor):
        return "mesh"
    return "flat" if isinstance(value, FlatShard) else "whole"


def _as_sent(value: Any) -> Any:
    if isinstance(value, FlatShard):
        return value._replace(tensor=_on_cpu(value.tensor))
    return _on_cpu(value)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _assemble(parts: list[Any]) -> Any:
    """One value of what ranks have sent: pieces, or the same whole from some of them."""
    pieces = [part for part in parts if isinstance(part, FlatShard)]
    if not pieces:
        return next(part for part in parts if part is not None)
    shape, dtype = pieces[0].global_shape, pieces[0].tensor.dtype
    whole = torch.zeros(torch.Size(shape).numel(), dtype=dtype)
    for piece in pieces:
        whole[piece.offset : piece.offset + piece.tensor.numel()] = piece.tensor.flatten()
    return whole.view(shape)


def cut(whole: Any, like: Any) -> Any:
    """This rank's part of a whole value: of the kind, the place and the type that ``like`` has."""
    if isinstance(like, FlatShard):
        flat = _tensor(whole).flatten()[like.offset : like.offset + like.tensor.numel()]
        part = flat.to(like.tensor.device, like.tensor.dtype, copy=True)
        return like._replace(tensor=part.view(like.tensor.shape))
    if isinstance(like, DTensor):
        local = _tensor(whole).to(like.device, like.dtype)
        # None: every rank has read the same file, and nothing needs to be sent.
        return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
    if isinstance(like, Tensor):
        return _tensor(whole).to(like.device, like.dtype, copy=True)
    return whole.item() if isinstance(whole, Tensor) and whole.numel() == 1 else whole


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value)


def as_torch(
    groups: list[Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """An optimizer's state as torch writes it, by number of the parameter.

    ``groups`` and ``state`` are by name, as ``Engine.state_dict`` has them.
    """
    numbers = {name: number for number, name in enumerate(_names(groups))}
    return {
        "state": {numbers[name]: dict(slots) for name, slots in state.items() if slots},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
        ],
    }


def by_name(saved: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What ``as_torch`` has written, by the names in ``groups``.

    Raises:
        ConfigError: the groups are others than these.
    """
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group["params"]) for group in groups]
    if theirs != ours:
        raise ConfigError(
            f"the checkpoint's optimizer has groups of {theirs} parameters, this run's of {ours}",
            fix="resume with the optimizers that were saved",
        )
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    names = dict(zip(numbers, _names(groups), strict=True))
    return {
        "state": {names[number]: dict(slots) for number, slots in saved["state"].items()},
        "groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(own["params"])}
            for group, own in zip(saved["param_groups"], groups, strict=True)
        ],
    }


def _names(groups: list[Mapping[str, Any]]) -> Iterator[str]:
    return (name for group in groups for name in group["params"])
