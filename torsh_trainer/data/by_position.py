"""Orders computed from positions: nothing is listed, and each may begin anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
At = Callable[[Words], npt.NDArray[Any]]
"""Sample ids at positions, shape (n,) both."""

ROUNDS = 24
BLOCK = 1 << 14
"""Positions that are looked up at once: a batch then costs microseconds."""


def permutation(size: int, keys: Sequence[int]) -> At:
    """A permutation of ``range(size)`` chosen by ``ROUNDS`` 63-bit ``keys``; ``size`` below 2**62.

    A Feistel network over a table of rows and columns, one of which is shifted in each round by a
    hash of the other. What leaves ``range(size)`` walks on until it is back (Black and Rogaway
    2002): the table has one row more at most than there are samples for.
    """
    bits = (size - 1).bit_length() // 2
    rows = -(-size >> bits)
    shift, mask, count = np.uint64(bits), np.uint64((1 << bits) - 1), np.uint64(rows)
    # Of a hash as many of the upper bits as their product with ``rows`` has room for.
    surplus = np.uint64(rows.bit_length())
    room = np.uint64(64 - rows.bit_length())
    words = [np.uint64(key) for key in keys]

    def once(numbers: Words) -> Words:
        row, column = numbers >> shift, numbers & mask
        for by_row, by_column in zip(words[::2], words[1::2], strict=True):
            column = (column + _hash_words(row + by_row)) & mask
            row += (_hash_words(column + by_column) >> surplus) * count >> room
            row -= (row >= count) * count
        return (row << shift) | column

    def at(positions: Words) -> Words:
        ids = once(positions)
        outside = np.flatnonzero(ids >= np.uint64(size))
        while len(outside):
            ids[outside] = once(ids[outside])
            outside = outside[ids[outside] >= np.uint64(size)]
        return ids

    return at


def draws(cumulative: npt.NDArray[np.float64], key: int) -> At:
    """Draws with replacement in proportion to weights, by a 63-bit ``key``.

    ``cumulative`` are the sums of weights up to and with each sample, shape (size,).
    """
    total = cumulative[-1]
    largest = np.nextafter(total, 0.0)

    def at(positions: Words) -> npt.NDArray[np.int64]:
        uniform = (_hash_words(positions * _GOLDEN + np.uint64(key)) >> np.uint64(11)) * 2.0**-53
        sought = np.minimum(uniform * total, largest)
        nearby = np.argsort(sought)  # neighbours are looked for in memory that is at hand
        ids = np.empty(len(sought), dtype=np.int64)
        ids[nearby] = np.searchsorted(cumulative, sought[nearby], side="right")
        return ids

    return at


class Computed:
    """The ids of an epoch by position."""

    def __init__(self, at: At, size: int) -> None:
        self._at = at
        self._size = size
        self._first = 0
        self._block: npt.NDArray[Any] = np.empty(0, dtype=np.int64)

    def ids(self, start: int, stop: int) -> list[int]:
        if start < self._first or stop > self._first + len(self._block):
            last = min(max(stop, start + BLOCK), self._size)
            self._block = self._at(np.arange(start, last, dtype=np.uint64))
            self._first = start
        found: list[int] = self._block[start - self._first : stop - self._first].tolist()
        return found


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def _hash_words(words: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), in place."""
    words ^= words >> _30
    words *= _MIX_1
    words ^= words >> _27
    words *= _MIX_2
    words ^= words >> _31
    return words
