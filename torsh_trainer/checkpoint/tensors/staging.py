"""Host memory for the copy that an asynchronous save is written from.

Memory that is new costs a page fault every few KiB, five times what the copy itself takes. So it is
kept between saves, and it is touched ahead, on a thread, while training goes on. It holds one copy
of what this rank writes, never more.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_trainer.errors import ResourceError

log = logging.getLogger(__name__)

_ALIGNMENT = 64
_PIECE_BYTES = 1 << 24
"""What one thread copies, or touches, at a time."""
_SMALL_BYTES = 1 << 18
"""Tensors up to this size are copied by one call for all of them."""


class Staging:
    """Memory for copies of tensors, kept from one save to the next; ``threads`` copy into it.

    Beside CUDA it is page-locked, so that copies run at the speed of the bus. torch's own allocator
    of such memory would round it up to a power of two, and never give it back.
    """

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._layout: list[_Room] = []
        self._memory: _Memory | None = None
        self._copies: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Host memory held at present."""
        return 0 if self._memory is None else self._memory.size_bytes

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Makes room for copies of tensors like these; a thread goes on touching it."""
        layout, size_bytes = _lay_out(tensors)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        memory = self._memory
        if memory is None or memory.device != device or memory.size_bytes < size_bytes:
            self.close()  # before there is new memory: never both
            self._memory = _Memory(size_bytes, device=device)
        self._layout = layout
        self._copies = []

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies tensors like those of ``prepare``; returns once the originals may change.

        The copies hold until the next call, and each is all of its own storage.

        Raises:
            ResourceError: there is not enough memory.
        """
        if not self._copies:
            assert self._memory is not None, "prepare comes first"
            self._copies = self._memory.within(self._layout)
        originals = [tensor.detach() for tensor in tensors]
        _copy(self._copies, originals, threads=self._threads)
        return self._copies

    def close(self) -> None:
        """Gives the memory back."""
        memory, self._memory = self._memory, None
        self._layout, self._copies = [], []
        if memory is not None:
            memory.close()


class _Room(NamedTuple):
    """Where the copy of one tensor lies."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def at(self, base: int, owner: object) -> Tensor:
        count = math.prod(self.size)
        if not count:
            return torch.empty(self.size, dtype=self.dtype)
        # Over just these bytes: torch.save writes the whole of a storage.
        raw = (ctypes.c_char * (count * self.dtype.itemsize)).from_address(base + self.offset)
        raw.owner = owner  # type: ignore[attr-defined] # lives as long as the tensor
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(self.dtype)
        return flat.as_strided(self.size, self.stride)


def _lay_out(tensors: Sequence[Tensor]) -> tuple[list[_Room], int]:
    rooms, offset = [], 0
    for tensor in tensors:
        like = torch.empty_like(tensor, device="meta")  # keeps the order of dimensions in memory
        rooms.append(_Room(offset, tuple(like.shape), like.stride(), like.dtype))
        offset += -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
    return rooms, offset


class _Memory:
    """Bytes of host memory, made ready by a thread; page-locked for copies from ``device``."""

    def __init__(self, size_bytes: int, *, device: torch.device | None) -> None:
        self.size_bytes = size_bytes
        self.device = device
        self._locked = False
        self._held: Any = None  # the owner of the memory
        self._base = 0
        self._given_up = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="making room for checkpoints")
        self._thread.start()

    def within(self, layout: Sequence[_Room]) -> list[Tensor]:
        """Tensors over this memory, once every page is there; they keep it alive.

        Raises:
            ResourceError: there is not enough memory.
        """
        self._thread.join()
        if self._error is not None:
            raise ResourceError(
                f"there are no {self.size_bytes / 2**20:.0f} MiB of memory for the copy that an "
                f"asynchronous save needs ({self._error})",
                fix="set checkpoint.mode=sync, or spread training over more processes",
                size_bytes=self.size_bytes,
            ) from self._error
        return [room.at(self._base, self._held) for room in layout]

    def close(self) -> None:
        self._given_up = True
        self._thread.join()
        if self._locked:  # copies that outlive it keep the memory, as pages like any
            self._locked = False
            torch.cuda.cudart().cudaHostUnregister(self._base)
        self._held = None

    def _make(self) -> None:
        size = max(self.size_bytes, mmap.PAGESIZE)
        try:
            self._held, self._base = _map_memory(size)
            pages = torch.frombuffer(self._held, dtype=torch.uint8)[:: mmap.PAGESIZE]
            for some in pages.split(_PIECE_BYTES // mmap.PAGESIZE):
                if self._given_up:
                    return
                some.zero_()
            if self.device is not None:
                self._locked = _lock_pages(self._base, size, self.device)
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            self._error = error


def _lock_pages(base: int, size_bytes: int, device: torch.device) -> bool:
    """Locks pages for copies from ``device``; says so where the system does not let it."""
    with torch.cuda.device(device):  # a thread begins on device 0, and would make a context there
        code = int(torch.cuda.cudart().cudaHostRegister(base, size_bytes, 0))
    if code:
        log.warning(
            "%.0f MiB for the copy of asynchronous saves are not page-locked (CUDA error %d): the "
            "copy is slower, and right",
            size_bytes / 2**20,
            code,
        )
    return not code


def _map_memory(size_bytes: int) -> tuple[Any, int]:
    """Anonymous memory in huge pages where the system has them, and its address."""
    mapping = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    view = (ctypes.c_char * size_bytes).from_buffer(mapping)
    return view, ctypes.addressof(view)


def _copy(copies: Sequence[Tensor], originals: Sequence[Tensor], *, threads: int) -> None:
    devices = {tensor.device for tensor in originals if tensor.device.type != "cpu"}
    if devices:
        torch._foreach_copy_(list(copies), list(originals), non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        return
    pairs = list(zip(copies, originals, strict=True))
    small = [pair for pair in pairs if pair[0].nbytes <= _SMALL_BYTES]
    if small:
        torch._foreach_copy_([to for to, _ in small], [of for _, of in small])
    large = [part for pair in pairs if pair[0].nbytes > _SMALL_BYTES for part in _parts(*pair)]
    if torch.get_num_threads() > 1 or threads == 1 or len(large) < threads:
        _copy_each(large)  # torch itself spreads one copy over its threads
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_copy_each, [large[i::threads] for i in range(threads)]))


def _copy_each(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for to, of in pairs:
        to.copy_(of)


def _parts(to: Tensor, of: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A copy as several, so that threads can share it."""
    if to.stride() != of.stride():
        return [(to, of)]
    flat = (to.numel(),), (1,)  # the strides of a copy have no holes
    count = _PIECE_BYTES // to.dtype.itemsize
    pieces = to.as_strided(*flat).split(count), of.as_strided(*flat).split(count)
    return list(zip(*pieces, strict=True))
