"""DTensors of which a process has rows that do not lie together: boxes of the whole tensor.

Where a layer holds several projections one after the other, each is cut by itself: a process has
rows of the first, then rows of the second. DCP takes what a process holds for one box.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


class RowBox(NamedTuple):
    """A box of the whole tensor, and where it begins in what this process holds."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begins: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """The part of ``local`` that it is."""
        for dim, (begin, size) in enumerate(zip(self.begins, self.sizes, strict=True)):
            local = local.narrow(dim, begin, size)
        return local


def find_scattered_rows(leaf: object) -> list[RowBox]:
    """The boxes that this process holds of ``leaf``, where they are several; else none."""
    if not isinstance(leaf, DTensor):
        return []
    if not any(isinstance(placement, _StridedShard) for placement in leaf.placements):
        return []
    runs = [_runs_of(leaf, dim) for dim in range(leaf.dim())]
    found = [
        RowBox(*(tuple(run[i] for run in chosen) for i in (0, 1, 2)))
        for chosen in itertools.product(*runs)
    ]
    return found if len(found) > 1 else []


def _runs_of(leaf: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """(offset, size, place here) of the numbers of ``dim`` that this process has."""
    own = torch.arange(leaf.shape[dim])
    place = leaf.device_mesh.get_coordinate()
    assert place is not None, "a process that has no part of it"
    for axis, placement in enumerate(leaf.placements):
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            pieces = _chunk(own, int(placement.split_factor))
        elif isinstance(placement, Shard) and placement.dim == dim:
            pieces = [own]
        else:
            continue
        count = leaf.device_mesh.size(axis)
        own = torch.cat([_chunk(piece, count)[place[axis]] for piece in pieces])
    jumps = (own.diff() != 1).nonzero().flatten() + 1
    begins = [0, *jumps.tolist()]
    ends = [*jumps.tolist(), len(own)]
    return [(int(own[b]), e - b, b) for b, e in zip(begins, ends, strict=True) if e > b]


def _chunk(own: Tensor, count: int) -> list[Tensor]:
    """``count`` pieces, the first ones of one size, as torch cuts; the last may be empty."""
    size = -(-len(own) // count)
    return [own[i * size : (i + 1) * size] for i in range(count)]
