"""Members on one host: memory that all of them reach, and reductions in it without messages.

A tensor that every member has made with ``Room.zeros`` is reduced where it lies: each member adds
up its share of it over everybody's memory, and writes the result into everybody's. Any other tensor
goes through a stage in the room, a part at a time. Members wait for one another on semaphores in
that memory: they sleep, without Python's lock and without a processor.

The memory has no name in any file system. Nothing is left over when a process is killed, and the
small /dev/shm of a container is no limit.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import mmap
import os
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from mpi4py import MPI
from torch import Tensor

from torsh_mpi.agreement import Agreement, described
from torsh_mpi.numbers import CODES, accumulate

MIN_COUNT = 1 << 15
"""From so many elements on a tensor in the room is reduced faster than by messages."""
STAGED_COUNT = 1 << 22
"""From so many elements on any other tensor is, too."""
STAGE_BYTES = 1 << 20
"""Of each member, for tensors that are not in the room; more where larger ones are announced."""
PIECE = 1 << 16
"""Elements that are added up at once: what was written is still in the cache when it is copied."""
_SPIN_S = 200e-6
"""How long a member looks for the others before it sleeps, where each has a processor."""
_SLICE_S = 1
_LINE = 64  # bytes of a cache line; any libc's sem_t fits in
_WORDS = struct.Struct("4q")
_OUTSIDE = -1
_MOST_KNOWN = 64

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None)
_Made = TypeVar("_Made")


class Interrupted(MPI.Exception):
    """Somebody broke off what the members of a room were doing."""


class Room:
    """What members do in memory that they share; ``open_room`` makes it."""

    def __init__(
        self, comm: MPI.Intracomm, gate: Gate, stage: Segments, agreement: Agreement
    ) -> None:
        self.gate = gate
        self._comm = comm
        self._stage = stage
        self._agreement = agreement
        self._placed: dict[int, Segments] = {}  # those whose tensor is still in use
        self._count = 0
        self._counts: set[int] = set()  # the same on every member, unlike what is still in use
        self._whole: set[int] = set()  # bytes of tensors that go through the stage in one part

    def wants(self, count: int) -> bool:
        """Whether members meet here to reduce ``count`` elements; all of them say the same."""
        return count >= STAGED_COUNT or count in self._counts

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` zeros in the room, or outside where it has no place: collective."""
        self._count += 1
        segments = _segments(self._comm, count * dtype.itemsize)
        if segments is None:
            return torch.zeros(count, dtype=dtype)
        self._counts.add(count)
        tensor = segments.lend(dtype, count, _Forget(self._placed, self._count))
        self._placed[self._count] = segments
        return tensor

    def stage(self, count: int, dtype: torch.dtype) -> None:
        """Has tensors of so many elements go through the stage in one part: collective."""
        size = count * dtype.itemsize
        if size > self._stage.stride:
            stage = _segments(self._comm, size)
            if stage is None:
                return
            self._stage = stage
        self._whole.add(size)
        self._counts.add(count)

    def common(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """``count`` zeros in one memory of all members, or None on all of them: collective."""
        size = max(1, count) * dtype.itemsize
        memory = _in_memory(self._comm, size, lambda descriptor: mmap.mmap(descriptor, size))
        return None if memory is None else torch.frombuffer(memory, dtype=dtype, count=count)

    @torch.inference_mode()  # a tensor may be written whatever autograd wants with it
    def all_reduce(self, tensor: Tensor, kind: str) -> bool:
        """Reduces a contiguous ``tensor`` over all members, in place, to the same bits on each.

        False, on all of them, where messages are faster: nothing has been done.

        Raises:
            Interrupted: the wait for the others was broken off.
            MismatchError: they reduce another number of elements, dtype or operation.
        """
        flat = tensor.view(-1)
        count, dtype = flat.numel(), flat.dtype
        place, offset = self._find(flat)
        whole = flat.nbytes in self._whole
        parts = (flat,) if whole else flat.split(STAGE_BYTES // dtype.itemsize)
        staged = whole or count >= STAGED_COUNT
        if staged and place == _OUTSIDE:
            self._stage.copy_in(parts[0])
        said = self.gate.arrive(Said(place, offset, count, CODES[dtype, kind]))
        if _differ(said):
            raise self._agreement.mismatch(described("all_reduce", tensor, kind))
        if place != _OUTSIDE and said.count(said[0]) == len(said):
            self._placed[place].reduce(flat, offset, kind)
            self.gate.arrive()
            return True
        if staged:
            self._through_stage(parts, kind, mixed=any(w.place != _OUTSIDE for w in said))
        return staged

    def meet(self) -> None:
        """Returns when every member has called it.

        Raises:
            Interrupted: the wait for the others was broken off.
            MismatchError: they reduce something.
        """
        if _differ(self.gate.arrive(_NOTHING)):
            raise self._agreement.mismatch("barrier")

    def _through_stage(self, parts: tuple[Tensor, ...], kind: str, *, mixed: bool) -> None:
        """Part by part; the first is there already, unless some member's lies in the room."""
        for number, part in enumerate(parts):
            if number or mixed:
                self._stage.copy_in(part)
                self.gate.arrive()
            self._stage.reduce(part, 0, kind)
            self.gate.arrive()
            self._stage.copy_out(part)

    def _find(self, flat: Tensor) -> tuple[int, int]:
        """The number of the segments that ``flat`` lies in, and from which byte on."""
        pointer, size = flat.data_ptr(), flat.nbytes
        for number, segments in tuple(self._placed.items()):
            offset = pointer - segments.begin
            if 0 <= offset <= segments.stride - size:
                return number, offset
        return _OUTSIDE, 0


class Said(NamedTuple):
    """What a member is about to reduce, and where that lies."""

    place: int
    offset: int
    elements: int
    code: int


_NOTHING = Said(_OUTSIDE, 0, 0, -1)


def _differ(said: list[Said]) -> bool:
    """Whether members do not do the same; where their tensors lie is their own affair."""
    return any(words[2:] != said[0][2:] for words in said)


class Segments:
    """Memory of ``stride`` bytes for each member, which all of them reach."""

    def __init__(self, descriptor: int, *, rank: int, members: int, stride: int) -> None:
        self.stride = stride
        self.begin = 0
        self._rank = rank
        self._members = members
        whole = mmap.mmap(descriptor, members * stride)
        self._bytes = torch.frombuffer(whole, dtype=torch.uint8).view(members, stride)
        self._own: mmap.mmap | None = mmap.mmap(descriptor, stride, offset=rank * stride)
        self._lent: weakref.ref[mmap.mmap] | None = None
        self._known: dict[tuple[torch.dtype, int, int], list[tuple[Tensor, ...]]] = {}

    def lend(self, dtype: torch.dtype, count: int, back: Callable[[object], None]) -> Tensor:
        """This member's memory, mapped once more; ``back`` is called when nobody has it any more.

        Its pages are touched here, so that they are near this member's processor.
        """
        own, self._own = self._own, None
        assert own is not None, "lent once"
        self._lent = weakref.ref(own, back)
        tensor = torch.frombuffer(own, dtype=dtype, count=count).zero_()
        self.begin = tensor.data_ptr()
        return tensor

    def copy_in(self, part: Tensor) -> None:
        """Puts here what the others will reduce of ``part``."""
        for here, there in self._of_others(part):
            here.copy_(there)

    def copy_out(self, part: Tensor) -> None:
        """Takes from here what the others have reduced of ``part``."""
        for here, there in self._of_others(part):
            there.copy_(here)

    def reduce(self, own: Tensor, offset: int, kind: str) -> None:
        """This member's share of what begins at byte ``offset`` everywhere, for everybody.

        ``own`` is what this member gives, and gets its share at once; it may lie here as well.
        """
        begin, end = self._bounds(own.numel())
        mine = own[begin:end].split(PIECE)
        for piece, others in zip(mine, self._share(own, offset), strict=True):
            accumulate([*others[: self._rank], piece, *others[self._rank :]], kind, piece)
            for other in others:
                other.copy_(piece)

    def _share(self, own: Tensor, offset: int) -> list[tuple[Tensor, ...]]:
        """The pieces of this member's share, each as it lies in the others' memory."""
        key = own.dtype, offset, own.numel()
        pieces = self._known.get(key)
        if pieces is None:
            begin, end = self._bounds(own.numel())
            rows = [row for member, row in enumerate(self._bytes) if member != self._rank]
            parts = [row[offset : offset + own.nbytes].view(own.dtype)[begin:end] for row in rows]
            pieces = list(zip(*(part.split(PIECE) for part in parts), strict=True))
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[key] = pieces
        return pieces

    def _of_others(self, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """In this member's memory and in ``part``: what is not this member's share."""
        begin, end = self._bounds(part.numel())
        here = self._bytes[self._rank, : part.nbytes].view(part.dtype)
        yield here[:begin], part[:begin]
        yield here[end:], part[end:]

    def _bounds(self, count: int) -> tuple[int, int]:
        """From which element to which this member's share goes."""
        return count * self._rank // self._members, count * (self._rank + 1) // self._members


class Gate:
    """Where members wait for one another: a semaphore for each, in memory that they share.

    Who arrives posts everybody else's semaphore, and waits for as many posts on its own. A post of
    the next meeting may come before one of this; whoever makes it has passed this meeting, so all
    have arrived here.
    """

    def __init__(self, descriptor: int, *, rank: int, members: int, spin_s: float) -> None:
        self.waiting = False
        self._rank = rank
        self._members = members
        self._spin_s = spin_s
        self._turn = 0
        self._memory = mmap.mmap(descriptor, self.size(members))
        self._start = ctypes.c_char.from_buffer(self._memory)
        first = ctypes.addressof(self._start) + _LINE * (1 + 2 * members)
        every = [ctypes.c_void_p(first + _LINE * member) for member in range(members)]
        self._mine = every[rank]
        self._others = every[:rank] + every[rank + 1 :]
        if rank == 0:
            for semaphore in every:
                _libc.sem_init(semaphore, 1, 0)

    @staticmethod
    def size(members: int) -> int:
        """Bytes: a line for the mark of an end; for each member two of words, and a semaphore."""
        return _LINE * (1 + 3 * members)

    def arrive(self, said: Said | None = None) -> list[Said]:
        """Returns when all have arrived, with what each of them has said.

        A collective begins with a meeting in which something is said, and that may take long. In
        the others nothing is said, and nobody is far: they are worth a look before sleeping. What
        is said next goes elsewhere: not everybody may have read this by then.

        Raises:
            Interrupted: somebody broke it off.
        """
        begin = _LINE * (1 + self._turn * self._members)
        if said is not None:
            _WORDS.pack_into(self._memory, begin + _LINE * self._rank, *said)
            self._turn = 1 - self._turn
        self._check()
        for other in self._others:
            _libc.sem_post(other)
        self.waiting = True
        try:
            for _ in self._others:
                self._wait(spins=said is None or _in_main_thread())
        finally:
            self.waiting = False
        self._check()
        if said is None:
            return []
        places = range(begin, begin + _LINE * self._members, _LINE)
        return [Said(*_WORDS.unpack_from(self._memory, place)) for place in places]

    def break_off(self) -> bool:
        """Ends what the members wait for, now and later; says whether this one did wait."""
        waiting = self.waiting
        self._memory[0] = 1
        for semaphore in (self._mine, *self._others):
            for _ in self._others:
                _libc.sem_post(semaphore)
        return waiting

    def _wait(self, *, spins: bool) -> None:
        """Takes a post."""
        if _libc.sem_trywait(self._mine) == 0:
            return
        if spins and self._spin_s:
            end_s = time.perf_counter() + self._spin_s
            while time.perf_counter() < end_s:
                if _libc.sem_trywait(self._mine) == 0:
                    return
        limit = _Time(int(time.time()) + 1 + _SLICE_S, 0)
        while _libc.sem_timedwait(self._mine, ctypes.byref(limit)) != 0:
            self._check()  # and Python answers signals
            limit.seconds = int(time.time()) + 1 + _SLICE_S

    def _check(self) -> None:
        if self._memory[0]:
            raise Interrupted(MPI.ERR_OTHER)


def _in_main_thread() -> bool:
    """Any other runs beside one that computes, and leaves it the processor."""
    return _thread.get_ident() == threading.main_thread().ident


class _Time(ctypes.Structure):
    """A ``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Forget:
    """Takes an entry out of a dictionary."""

    def __init__(self, entries: dict[int, Segments], number: int) -> None:
        self._entries = entries
        self._number = number

    def __call__(self, _: object) -> None:
        self._entries.pop(self._number, None)


def open_room(comm: MPI.Intracomm, agreement: Agreement) -> Room | None:
    """A room for the members of ``comm``, or None on all of them: collective."""
    rank, members = comm.Get_rank(), comm.Get_size()
    told = comm.allgather(_here())
    hosts = {host for host, _ in told}
    if members == 1 or len(hosts) > 1 or "" in hosts:
        return None
    processors = set().union(*(own for _, own in told))
    spin_s = _SPIN_S if len(processors) >= members else 0.0
    gate = _in_memory(
        comm,
        Gate.size(members),
        lambda descriptor: Gate(descriptor, rank=rank, members=members, spin_s=spin_s),
    )
    stage = _segments(comm, STAGE_BYTES)
    if gate is None or stage is None:
        log.info("the members of a group share no memory, and exchange messages instead")
        return None
    return Room(comm, gate, stage, agreement)


def _here() -> tuple[str, set[int]]:
    """The host that runs this process, or nothing where there is no memory to share; its cores."""
    if not hasattr(os, "memfd_create"):
        return "", set()
    kernel = Path("/proc/sys/kernel/random/boot_id")
    return kernel.read_text() if kernel.exists() else "", os.sched_getaffinity(0)


def _segments(comm: MPI.Intracomm, size: int) -> Segments | None:
    """Segments of ``size`` bytes, in whole pages, or None on all members."""
    rank, members = comm.Get_rank(), comm.Get_size()
    stride = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    return _in_memory(
        comm,
        members * stride,
        lambda descriptor: Segments(descriptor, rank=rank, members=members, stride=stride),
    )


def _in_memory(comm: MPI.Intracomm, size: int, make: Callable[[int], _Made]) -> _Made | None:
    """What ``make`` makes of a descriptor of ``size`` bytes, or None where a member has failed.

    Rank 0 makes the memory, and the first thing of it; the others open it through /proc.
    """
    made, told, descriptor = None, ("", ""), -1
    root = comm.Get_rank() == 0
    try:
        if root:
            name = f"torsh-mpi-{uuid.uuid4().hex}"
            descriptor = os.memfd_create(name)
            os.ftruncate(descriptor, size)
            made = make(descriptor)
            told = (f"/proc/{os.getpid()}/fd/{descriptor}", name)
    except OSError as error:
        log.info("no memory to share: %s", error)
    path, name = comm.bcast(told)
    try:
        # In another namespace of processes the path may lead to anything.
        if not root and path and name in str(Path(path).readlink()):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            made = make(descriptor)
    except OSError as error:
        log.info("no memory to share: %s", error)
    everybody = comm.allreduce(int(made is not None), MPI.MIN)
    if descriptor >= 0:
        os.close(descriptor)
    return made if everybody else None
