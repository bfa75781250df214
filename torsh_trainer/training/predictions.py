"""Predictions of a split: to the host batch by batch, and from all ranks into one file.

What a rank holds goes through a file of its own in the run directory: a collective of objects would
give every rank what all have, through the memory of their devices.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torsh_trainer.comm.base import Communicator
from torsh_trainer.utils.files import disk_error


def to_host(output: Any) -> Any:
    """``output`` with its tensors on the CPU, wherever they stand in tuples, lists and dicts.

    Each has memory of its own size: a view would keep, and save, all that it looks into.
    """
    return tree_map(_leaf_to_host, output)


def _leaf_to_host(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    held = leaf.detach().cpu()
    if held.layout is not torch.strided or held.untyped_storage().nbytes() <= held.nbytes:
        return held
    return held.clone()


def write_predictions(outputs: Iterable[Any], comm: Communicator, path: Path) -> None:
    """Writes to ``path``, on rank 0, the outputs of all ranks in the order of the samples.

    ``outputs`` are this rank's, one for each of its batches, which ranks take in turns: moved to
    the host as they come. Collective. Ranks whose ``path`` lies on a disk of their own send what
    they have to all others instead.

    Raises:
        ResourceError: the disk refuses.
    """
    mine = [to_host(output) for output in outputs]
    by_rank = [mine] if comm.size == 1 else _gather_outputs(mine, comm, path)
    if comm.world.is_rank_zero:
        rounds = max(map(len, by_rank))
        ordered = [part[i] for i in range(rounds) for part in by_rank if i < len(part)]
        _save(_join_parts(ordered), path)


def _gather_outputs(mine: list[Any], comm: Communicator, path: Path) -> list[list[Any]]:
    """Every rank's outputs, on rank 0."""
    name = comm.broadcast_object(f"{path.name}.{secrets.token_hex(4)}")  # no file is an older one
    parts = [path.with_name(f"{name}.{rank}") for rank in range(comm.size)]
    part = parts[comm.rank]
    try:
        if not comm.world.is_rank_zero:
            part.parent.mkdir(parents=True, exist_ok=True)
            _save(mine, part)
        comm.barrier()
        shared = comm.broadcast_object(all(other.exists() for other in parts[1:]))
        if not shared:
            return comm.all_gather_object(mine)
        found = [mine]
        if comm.world.is_rank_zero:  # its own files, written a moment ago
            found += [torch.load(p, map_location="cpu", weights_only=False) for p in parts[1:]]
        comm.barrier()
        return found
    finally:
        part.unlink(missing_ok=True)


def _save(value: Any, path: Path) -> None:
    try:
        torch.save(value, path)
    except OSError as error:
        raise disk_error(error, "write", path) from error


def _join_parts(parts: list[Any]) -> Any:
    if parts and all(isinstance(part, Tensor) for part in parts):
        return torch.cat([part if part.dim() else part[None] for part in parts])
    return [value for part in parts for value in (part if isinstance(part, list) else [part])]
