"""Adasum: a sum of gradients that adapts to how far they agree.

Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation" (arXiv:2006.02924). Of
two gradients it is

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

which is their sum where they are orthogonal and their mean where they are equal. Of more it is
``Adasum(Adasum(first half), Adasum(second half))``. Here by recursive vector halving (algorithm 1
of the paper): ranks exchange halves, quarters, ... of the vector, so that each computes on its own
part of it and sends ``2 (n-1)/n`` of it in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError


def adasum(tensor: Tensor, comm: Communicator, *, layers: Sequence[int] | None = None) -> None:
    """``tensor`` becomes the Adasum of all ranks' tensors, in place; the same on every rank.

    ``layers`` are the sizes of parts of the flattened tensor that are combined each on its own, as
    the paper does with the layers of a network; None combines it as one.

    Raises:
        ConfigError: the number of ranks is no power of two, the tensor is not floating-point, or
            ``layers`` do not add up to it.
    """
    size = comm.size
    if size & (size - 1):
        raise ConfigError(
            f"Adasum halves its vector over and over, and {size} processes are no power of two",
            fix=f"use {1 << (size.bit_length() - 1)} or {1 << size.bit_length()} processes",
        )
    if not tensor.is_floating_point():
        raise ConfigError(
            f"Adasum of {tensor.dtype} values is not of that dtype",
            fix="convert to a floating-point dtype first",
        )
    sizes = [tensor.numel()] if layers is None else list(layers)
    if sum(sizes) != tensor.numel():
        raise ConfigError(
            f"the layers have {sum(sizes)} elements together, the tensor {tensor.numel()}",
            fix="give the sizes of all parts, in order",
        )
    if size > 1:
        flat = tensor.contiguous().view(-1)
        tensor.copy_(_halve(_Part(flat, 0), 1, sizes, comm).view(tensor.shape))


class _Part(NamedTuple):
    """A piece of the flattened vector that begins at ``begin``."""

    values: Tensor
    begin: int


def _halve(part: _Part, distance: int, sizes: Sequence[int], comm: Communicator) -> Tensor:
    """The Adasum of the parts that ranks hold, over blocks of ranks from ``2 * distance`` on up."""
    rank = comm.rank
    is_left = rank // distance % 2 == 0
    other = rank + distance if is_left else rank - distance
    middle = part.values.numel() // 2
    left, right = part.values[:middle], part.values[middle:]
    kept, given = (left, right) if is_left else (right, left)
    taken = torch.empty_like(kept)
    _exchange(given, taken, other, comm)
    begin = part.begin if is_left else part.begin + middle
    # The left one's is always a, so that both compute the same.
    a, b = (kept, taken) if is_left else (taken, kept)
    mine = _combine(a, b, _layers_within(sizes, begin, kept.numel()), len(sizes), distance, comm)
    if 2 * distance < comm.size:
        mine = _halve(_Part(mine, begin), 2 * distance, sizes, comm)
    back = torch.empty_like(given)
    _exchange(mine, back, other, comm)
    return torch.cat((mine, back) if is_left else (back, mine))


def _combine(
    a: Tensor,
    b: Tensor,
    layers: Sequence[tuple[int, slice]],
    count: int,
    distance: int,
    comm: Communicator,
) -> Tensor:
    """This rank's part of Adasum(a, b); the blocks of ranks that hold the rest add their products.

    A layer that is zero on one side is the other side's.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    block = comm.rank // (2 * distance)
    blocks = comm.size // (2 * distance)
    products = torch.zeros(blocks, count, 3, dtype=torch.float64, device=a.device)
    for layer, part in layers:
        x, y = a[part].to(wide), b[part].to(wide)
        products[block, layer, 0] = torch.dot(x, y)
        products[block, layer, 1] = torch.dot(x, x)
        products[block, layer, 2] = torch.dot(y, y)
    # One small sum over all: a block's row is zero elsewhere, and needs no group of its own.
    comm.all_reduce(products)
    dots, squares_a, squares_b = products[block].unbind(dim=1)
    factors_a = 1.0 - torch.where(squares_a > 0.0, dots / (2.0 * squares_a), 0.0)
    factors_b = 1.0 - torch.where(squares_b > 0.0, dots / (2.0 * squares_b), 0.0)
    mine = torch.empty_like(a)
    for layer, part in layers:
        x, y = a[part].to(wide), b[part].to(wide)
        mine[part] = (x * factors_a[layer].to(wide) + y * factors_b[layer].to(wide)).to(a.dtype)
    return mine


def _layers_within(sizes: Sequence[int], begin: int, length: int) -> list[tuple[int, slice]]:
    """Which layers a part of the vector touches, and where in the part."""
    found, start = [], 0
    for layer, size in enumerate(sizes):
        low, high = max(start, begin), min(start + size, begin + length)
        if low < high:
            found.append((layer, slice(low - begin, high - begin)))
        start += size
    return found


def _exchange(given: Tensor, taken: Tensor, other: int, comm: Communicator) -> None:
    """Sends and receives at once; the sizes of two ranks' parts may differ by one element."""
    peer = dist.get_process_group_ranks(comm.process_group)[other]
    operations = []
    if given.numel():
        operations.append(dist.P2POp(dist.isend, given.contiguous(), peer, comm.process_group))
    if taken.numel():
        operations.append(dist.P2POp(dist.irecv, taken, peer, comm.process_group))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
