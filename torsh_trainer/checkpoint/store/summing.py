"""CRC-32 of large files, by as many threads as there are cores to spare; needs no torch."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple

from torsh_trainer.checkpoint.store.places import StoragePath

_BLOCK_BYTES = 1 << 20
_WORTH_A_THREAD_BYTES = 1 << 25
_MOST_THREADS = 4
"""More read, copy and sum up no faster: memory is the limit."""
_POLYNOMIAL = 0xEDB88320


class ByteSum(NamedTuple):
    """Size and CRC-32 of some bytes."""

    size_bytes: int
    crc: int


def spare_threads(processes: int) -> int:
    """How many threads each of ``processes`` on this machine may use to read, copy or sum up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores // processes))


def sum_up(path: StoragePath, *, threads: int = 1) -> ByteSum:
    """Reads a file and sums it up.

    Raises:
        OSError: the disk refused.
    """
    size = path.stat().st_size
    parts = max(1, min(threads, size // _WORTH_A_THREAD_BYTES))
    # The last part goes to the end, wherever that is by then.
    bounds = [size * i // parts for i in range(parts)] + [None]
    if parts == 1:
        return _part(path, 0, None)
    with ThreadPoolExecutor(parts) as pool:
        sums = list(pool.map(lambda pair: _part(path, *pair), pairwise(bounds)))
    total = sums[0]
    for part in sums[1:]:
        total = ByteSum(total.size_bytes + part.size_bytes, join_crcs(total.crc, part))
    return total


class RunningSum:
    """The CRC-32 of data as it passes, computed on a thread beside what is done with it."""

    def __init__(self) -> None:
        self.crc = 0
        self._asked: SimpleQueue[Any] = SimpleQueue()
        self._told: SimpleQueue[int] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextmanager
    def adding(self, data: Any) -> Iterator[None]:
        """Adds ``data`` while the block runs; then the data is the caller's again."""
        if memoryview(data).nbytes < _BLOCK_BYTES:
            self.crc = zlib.crc32(data, self.crc)
            yield
            return
        if self._thread is None:
            # No pool: that takes no more work once the program ends, and a save may outlive it.
            self._thread = threading.Thread(target=self._work, name="summing up a file")
            self._thread.start()
        self._asked.put(data)
        try:
            yield
        finally:
            self.crc = self._told.get()

    def close(self) -> None:
        """Ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._asked.put(None)
            thread.join()

    def _work(self) -> None:
        while (data := self._asked.get()) is not None:
            self._told.put(zlib.crc32(data, self.crc))
            del data  # it holds the memory of a tensor


def join_crcs(crc: int, more: ByteSum) -> int:
    """The CRC-32 of bytes with ``crc`` and those of ``more`` behind them.

    Appending n bytes multiplies a CRC, as a polynomial over GF(2), by x to the 8 n; this is
    crc32_combine of zlib (crc32.c), which Python does not offer.
    """
    return _product(_power_of_x(8 * more.size_bytes), crc) ^ more.crc


def _part(path: StoragePath, begin: int | None, end: int | None) -> ByteSum:
    size, crc = 0, 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(begin or 0)
        left = None if end is None else end - (begin or 0)
        while count := file.readinto(block if left is None else block[:left]):
            crc = zlib.crc32(block[:count], crc)
            size += count
            left = None if left is None else left - count
    return ByteSum(size, crc)


def _product(a: int, b: int) -> int:
    """Of two polynomials modulo the CRC's; the highest bit is the coefficient of 1."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    power, square = 1 << 31, 1 << 30  # 1, and x
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power
