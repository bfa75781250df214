"""Flat shards as what a checkpoint holds: rectangular pieces of a tensor.

An interval of a row-major tensor of ``d`` dimensions is at most ``2 d - 1`` boxes, each of them
contiguous in the interval: what is left of the first row, whole rows, what there is of the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.errors import TrainingError


class Box(NamedTuple):
    """A rectangular piece of a tensor; ``start`` is the flat index of its first element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [``start``, ``stop``) of a row-major tensor, in order, as boxes.

    A tensor without elements is one box, whatever the interval, so that somebody writes it.
    """
    if math.prod(shape) == 0:
        return [Box((0,) * len(shape), tuple(shape), 0)]
    return _boxes(tuple(shape), start, stop, (), 0) if start < stop else []


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...], base: int
) -> list[Box]:
    """``prefix`` leads to this row; ``base`` is the flat index of its first element."""
    ones = (1,) * len(prefix)
    if not shape:
        return [Box(prefix, ones, base)]
    inner = shape[1:]
    size = math.prod(inner)
    found: list[Box] = []
    row, begin = divmod(start, size)
    if begin or stop - start < size:  # a row of which only a part is meant
        end = min(size, begin + stop - start)
        found += _boxes(inner, begin, end, (*prefix, row), base + row * size)
        row += 1
    whole = stop // size - row
    if whole > 0:
        offsets = (*prefix, row, *(0,) * len(inner))
        found.append(Box(offsets, (*ones, whole, *inner), base + row * size))
        row += whole
    if row * size < stop:
        found += _boxes(inner, 0, stop - row * size, (*prefix, row), base + row * size)
    return found


def boxes_of(shard: FlatShard, name: str) -> list[Box]:
    """The boxes that a rank's shard consists of; none when it is empty.

    Raises:
        TrainingError: it does not lie within its tensor, or not in one piece of memory.
    """
    if not shard.tensor.is_contiguous():
        raise TrainingError(
            f"the flat shard of {name} is not contiguous in memory",
            fix="the engine that cuts it so is at fault: report this to its author",
            tensor=name,
        )
    whole, stop = math.prod(shard.global_shape), shard.offset + shard.tensor.numel()
    if shard.offset < 0 or stop > whole:
        raise TrainingError(
            f"the flat shard of {name} is elements {shard.offset} to {stop} of {whole}",
            fix="the engine that cuts it so is at fault: report this to its author",
            tensor=name,
        )
    return boxes(shard.global_shape, shard.offset, stop)


def piece(shard: FlatShard, box: Box) -> Tensor:
    """The part of the shard's own memory that is ``box``."""
    flat = shard.tensor.detach().view(-1)
    return flat.narrow(0, box.start - shard.offset, math.prod(box.sizes)).view(box.sizes)
