"""Shards that are no DTensors, as a state may hold them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class FlatShard(NamedTuple):
    """A rank's contiguous piece of a flattened (row-major) tensor, for engines that shard so.

    ``tensor`` holds the elements from ``offset`` on, in any shape; it may be empty. All ranks'
    pieces together make up a tensor of ``global_shape``; replicas hold the same piece.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: int
    tensor: Tensor
