"""States of engines as whole tensors: what a checkpoint would hold, without a disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator


def whole_state(
    state: Mapping[str, Any], comm: Communicator, pipeline: Communicator | None = None
) -> dict[str, Any]:
    """An engine's state with every shard put together, on every rank; on the CPU.

    ``pipeline`` are processes that have other stages of the model. Collective. What several ranks
    hold whole must be the same on all of them.

    Raises:
        AssertionError: it is not, or the pieces of a tensor leave a hole.
    """
    merged: dict[str, Any] = _merge(comm.all_gather_object(_without_dtensors(state)), "")
    if pipeline is not None and pipeline.size > 1:
        merged = _merge(pipeline.all_gather_object(merged), "")
    return merged


def fill(template: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """``template`` (of ``Engine.state_template``) with the values of a ``whole_state``.

    Tensors are filled in place, as a checkpointer does; entries that were not saved fall away.
    """
    return {key: _fill_value(value, saved[key]) for key, value in template.items() if key in saved}


def _without_dtensors(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().cpu().clone()
    if isinstance(value, FlatShard):
        return value._replace(tensor=value.tensor.detach().cpu().clone())
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _without_dtensors(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_dtensors(entry) for entry in value]
    return value


def _merge(values: list[Any], name: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _merge([v[key] for v in values if key in v], f"{name}/{key}") for key in keys}
    if isinstance(first, FlatShard):
        return _join_shards(values, name)
    if isinstance(first, Tensor):
        for other in values[1:]:
            same = torch.equal(first, other) or bool((first.isnan() & other.isnan()).any())
            assert same, f"{name.strip('/')} is not the same on all ranks"
    return first


def _join_shards(shards: list[FlatShard], name: str) -> Tensor:
    flat = shards[0].tensor.new_zeros(torch.Size(shards[0].global_shape).numel())
    covered = torch.zeros(flat.shape, dtype=torch.bool)
    for shard in shards:
        piece = slice(shard.offset, shard.offset + shard.tensor.numel())
        flat[piece] = shard.tensor.flatten()
        covered[piece] = True
    assert bool(covered.all()), f"the shards of {name.strip('/')} leave a hole"
    return flat.view(shards[0].global_shape)


@torch.no_grad()
def _fill_value(value: Any, saved: Any) -> Any:
    if isinstance(value, DTensor):
        whole = saved.to(value.device)
        value.copy_(distribute_tensor(whole, value.device_mesh, value.placements))
    elif isinstance(value, FlatShard):
        end = value.offset + value.tensor.numel()
        value.tensor.copy_(saved.flatten()[value.offset : end].view_as(value.tensor))
    elif isinstance(value, Tensor):
        value.copy_(saved)
    elif isinstance(value, Mapping):
        return fill(value, saved)
    else:
        return saved
    return value
