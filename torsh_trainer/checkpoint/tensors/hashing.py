"""A hash of a tensor's bits that does not depend on how the tensor is cut.

Every word of up to four bytes is multiplied by an odd number that follows from its place in the
whole tensor, and all products are added up modulo 2 ** 64. So pieces add up to the whole, in any
order, on any device. It finds what was lost, moved or changed; against intent it is no help.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torsh_trainer.checkpoint.base import MODULUS

ALGORITHM = "weighted sum of words, mod 2**64, 1"

_ROW = 1 << 15
"""Words that share one factor: they stay in the cache of a core, and are few enough that torch does
not spread one operation over threads, which costs more than it brings where cores are busy."""
_ON_A_DEVICE = 1 << 22
"""Words of which an accelerator holds products at a time, eight bytes each; a CPU holds a row."""


def hash_of(piece: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """What the rectangular ``piece`` at ``offsets`` adds to the hash of a tensor of ``shape``.

    A 0-dim int64 tensor on its device, modulo 2 ** 64; nothing is read on the host.
    """
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    if not piece.numel():
        return total
    words, per_element = _words(piece)
    start = sum(o * s for o, s in zip(offsets, _strides(shape), strict=True))
    run = _run_length(piece.shape, shape)
    if run == piece.numel():
        return total + _sum(words, start * per_element)
    # Rows that lie apart in the whole: each is a run of its own.
    firsts = _firsts(piece.shape, shape, run, piece.device) + start
    return total + _sum_of_runs(words, firsts * per_element, run * per_element)


def _words(piece: Tensor) -> tuple[Tensor, int]:
    """The bits of ``piece``, flat in row-major order, as integers; and how many an element has."""
    flat = piece.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    size = flat.element_size()
    kind = {1: torch.uint8, 2: torch.int16}.get(size, torch.int32)
    words = flat.view(kind)
    return words, words.numel() // piece.numel()


def _sum(words: Tensor, first: int) -> Tensor:
    """Of words at the places ``first``, ``first + 1``, ..."""
    weights = _weights(words.device)
    head = min(-first % _ROW, words.numel())
    whole = (words.numel() - head) // _ROW * _ROW
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if head:
        begin = first % _ROW
        total = _dot(words[:head], weights[begin : begin + head], first // _ROW)
    row = -(-first // _ROW)
    for part in words[head : head + whole].split(_at_once(words)) if whole else ():
        rows = part.view(-1, _ROW)
        if len(rows) == 1:
            total = total + _dot(rows[0], weights, row)
        else:
            factors = _mix(torch.arange(row, row + len(rows), device=words.device))
            total = total + ((rows * weights).sum(1) * factors).sum()
        row += len(rows)
    rest = words[head + whole :]
    if rest.numel():
        total = total + _dot(rest, weights[: rest.numel()], row)
    return total


def _dot(words: Tensor, weights: Tensor, row: int) -> Tensor:
    """Of words that lie in one row."""
    return (words * weights).sum() * _as_signed(_factor(row))


def _at_once(words: Tensor) -> int:
    return _ROW if words.device.type == "cpu" else _ON_A_DEVICE


def _sum_of_runs(words: Tensor, firsts: Tensor, run: int) -> Tensor:
    """Of runs of words, ``run`` long, that begin at the places ``firsts``."""
    weights = _weights(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    rows = max(1, _at_once(words) // run)
    along = torch.arange(run, device=words.device)
    for some, begins in zip(words.view(-1, run).split(rows), firsts.split(rows), strict=True):
        places = begins[:, None] + along
        factors = _mix(places // _ROW)
        total = total + (some * weights[places % _ROW] * factors).sum()
    return total


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _run_length(piece: Sequence[int], shape: Sequence[int]) -> int:
    """How many elements of the piece lie side by side in the whole."""
    run, whole = 1, True
    for mine, its in zip(reversed(piece), reversed(shape), strict=True):
        if not whole and mine > 1:
            break
        run *= mine
        whole = whole and mine == its
    return run


def _firsts(piece: Sequence[int], shape: Sequence[int], run: int, device: torch.device) -> Tensor:
    """Flat places in the whole, less the piece's own offset, at which the runs begin."""
    places = torch.zeros(1, dtype=torch.int64, device=device)
    inner = 1
    for mine, stride in zip(reversed(piece), reversed(_strides(shape)), strict=True):
        inner *= mine
        if inner <= run:
            continue
        steps = torch.arange(mine, device=device) * stride
        places = (steps[:, None] + places).flatten()
    return places


@functools.lru_cache(maxsize=4)
def _weights(device: torch.device) -> Tensor:
    return _mix(torch.arange(1, _ROW + 1, dtype=torch.int64)).to(device)


def _mix(numbers: Tensor) -> Tensor:
    """An odd number for each, by the finaliser of splitmix64; shifts keep the sign away."""
    mixed = (numbers + _as_signed(_SEED)) * _as_signed(_FIRST)
    mixed = (mixed ^ ((mixed >> 30) & ((1 << 34) - 1))) * _as_signed(_SECOND)
    mixed = (mixed ^ ((mixed >> 27) & ((1 << 37) - 1))) * _as_signed(_THIRD)
    return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) | 1


def _factor(number: int) -> int:
    """``_mix`` of one number, on the host."""
    mixed = (number + _SEED) * _FIRST % MODULUS
    mixed = (mixed ^ (mixed >> 30)) * _SECOND % MODULUS
    mixed = (mixed ^ (mixed >> 27)) * _THIRD % MODULUS
    return (mixed ^ (mixed >> 31)) | 1


def _as_signed(number: int) -> int:
    number %= MODULUS
    return number - MODULUS if number >= MODULUS // 2 else number


_SEED = 0x51A5EED
_FIRST = 0x9E3779B97F4A7C15
_SECOND = 0xBF58476D1CE4E5B9
_THIRD = 0x94D049BB133111EB
