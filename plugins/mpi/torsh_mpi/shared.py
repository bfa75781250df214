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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from mpi4py import MPI
from torch import Tensor

from torsh_mpi.agreement import Agreement, describe_call
from torsh_mpi.numbers import CODES, accumulate

MIN_COUNT = 1 << 15
"""From so many elements on a tensor in the room is reduced faster than by messages."""
STAGED_COUNT = 1 << 16
"""From so many elements on any other tensor is, too."""
PART_BYTES = 1 << 19
"""What goes through the stage at once of a tensor that is not in the room."""
STAGE_BYTES = 2 * PART_BYTES
"""Of each member: two parts; more where larger tensors are announced."""
PIECE = 1 << 16
"""Elements that are added up at once: what was written is still in the cache when it is copied."""
_SPIN_S = 5e-3
"""How long a member looks for the others before it sleeps, where each has a processor: to wake one
that sleeps in a virtual machine may take longer than all of a small all-reduce."""
_ALONE_S = 100e-6
"""How long before it offers the processor to whoever else may want it."""
_SLICE_S = 1
LINE = 64
"""Bytes of a cache line; any libc's sem_t fits in."""
_WORDS = struct.Struct("4q")
_OUTSIDE = -1
_MOST_KNOWN = 64

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None)
_Made = TypeVar("_Made")


class RoomInterrupted(MPI.Exception):
    """Somebody broke off what the members of a room were doing."""


class Room:
    """What members do in memory that they share; ``open_room`` makes it."""

    def __init__(
        self, comm: MPI.Intracomm, gate: Gate, stage: Segments, agreement: Agreement
    ) -> None:
        self.gate = gate
        self.rank = comm.Get_rank()
        self.members = comm.Get_size()
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
        segments = self.segments(count * dtype.itemsize)
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
            stage = self.segments(size)
            if stage is None:
                return
            self._stage = stage
        self._whole.add(size)
        self._counts.add(count)

    def common(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """``count`` zeros in one memory of all members, or None on all of them: collective."""
        size = max(1, count) * dtype.itemsize
        memory = self.in_memory(size, lambda descriptor: mmap.mmap(descriptor, size))
        return None if memory is None else torch.frombuffer(memory, dtype=dtype, count=count)

    def segments(self, size: int) -> Segments | None:
        """Memory of ``size`` bytes for each member, or None on all of them: collective."""
        return _segments(self._comm, size)

    def in_memory(self, size: int, make: Callable[[int], _Made]) -> _Made | None:
        """What ``make`` makes of a descriptor of ``size`` common bytes: collective."""
        return _in_memory(self._comm, size, make)

    def mismatch(self, words: str) -> Exception:
        """The error of members that found out that they differ; called by all of them."""
        return self._agreement.mismatch(words)

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
        staged = count >= STAGED_COUNT or flat.nbytes in self._whole
        way = self._way(flat) if staged else []
        if staged and place == _OUTSIDE:
            way[0].copy_in()
        said = self.gate.arrive(Said(place, offset, count, CODES[dtype, kind]))
        if differ(said):
            raise self._agreement.mismatch(describe_call("all_reduce", tensor, kind))
        if place != _OUTSIDE and said.count(said[0]) == len(said):
            share = self._placed[place].share(dtype, offset, count)
            own = share.cut(flat)[1:-1]
            share.reduce(own, own, kind)
            self.gate.arrive()
            return True
        if staged:
            if any(words.place != _OUTSIDE for words in said):
                if place != _OUTSIDE:
                    way[0].copy_in()
                self.gate.arrive()
            self._through_stage(way, kind)
        return staged

    def meet(self) -> None:
        """Returns when every member has called it.

        Raises:
            Interrupted: the wait for the others was broken off.
            MismatchError: they reduce something.
        """
        if differ(self.gate.arrive(_NOTHING)):
            raise self._agreement.mismatch("barrier")

    def _way(self, flat: Tensor) -> list[_Part]:
        """The parts in which ``flat`` goes through the stage, which has room for two at a time."""
        stage, dtype = self._stage, flat.dtype
        if flat.nbytes in self._whole:
            return [_Part(stage.share(dtype, 0, flat.numel()), flat)]
        return [
            _Part(stage.share(dtype, number % 2 * PART_BYTES, part.numel()), part)
            for number, part in enumerate(flat.split(PART_BYTES // dtype.itemsize))
        ]

    def _through_stage(self, way: Sequence[_Part], kind: str) -> None:
        """Part by part; the first is there already. Between two meetings a part is reduced, the
        one before it is taken out, and the one behind it takes its place."""
        last: _Part | None = None
        for number, part in enumerate(way, start=1):
            if last is not None:
                last.copy_out()
            part.reduce(kind)
            if number < len(way):
                way[number].copy_in()
            self.gate.arrive()
            last = part
        if last is not None:
            last.copy_out()

    def _find(self, flat: Tensor) -> tuple[int, int]:
        """The number of the segments that ``flat`` lies in, and from which byte on."""
        pointer, size = flat.data_ptr(), flat.nbytes
        for number, segments in tuple(self._placed.items()):
            offset = pointer - segments.begin
            if 0 <= offset <= segments.stride - size:
                return number, offset
        return _OUTSIDE, 0


class _Part:
    """A part of a tensor on its way through a stage."""

    def __init__(self, share: ReductionShare, part: Tensor) -> None:
        self._share = share
        self._cuts = share.cut(part)

    def copy_in(self) -> None:
        self._share.copy_in(self._cuts)

    def copy_out(self) -> None:
        self._share.copy_out(self._cuts)

    def reduce(self, kind: str) -> None:
        own = self._cuts[1:-1]
        self._share.reduce(own, own, kind)


class Said(NamedTuple):
    """What a member is about to reduce, and where that lies."""

    place: int
    offset: int
    elements: int
    code: int


_NOTHING = Said(_OUTSIDE, 0, 0, -1)


def differ(said: list[Said]) -> bool:
    """Whether members do not do the same; where their tensors lie is their own affair."""
    return any(words[2:] != said[0][2:] for words in said)


class Segments:
    """Memory of ``stride`` bytes for each member, which all of them reach."""

    def __init__(self, descriptor: int, *, rank: int, members: int, stride: int) -> None:
        self.stride = stride
        self.begin = 0
        self.rank = rank
        self._members = members
        whole = mmap.mmap(descriptor, members * stride)
        self._bytes = torch.frombuffer(whole, dtype=torch.uint8).view(members, stride)
        self._own: mmap.mmap | None = mmap.mmap(descriptor, stride, offset=rank * stride)
        self._lent: weakref.ref[mmap.mmap] | None = None
        self._known: dict[tuple[torch.dtype, int, int], ReductionShare] = {}

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

    def rows(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """The first ``count`` elements of everybody's memory, by rank."""
        return [row[: count * dtype.itemsize].view(dtype) for row in self._bytes.unbind()]

    def share(self, dtype: torch.dtype, offset: int, count: int) -> ReductionShare:
        """This member's share of ``count`` elements from byte ``offset`` on."""
        key = dtype, offset, count
        share = self._known.get(key)
        if share is None:
            end = offset + count * dtype.itemsize
            rows = [row[offset:end].view(dtype) for row in self._bytes.unbind()]
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            share = self._known[key] = ReductionShare(rows, rank=self.rank)
        return share


class ReductionShare:
    """What one member reduces of a stretch that every member has in ``rows``, for all of them.

    A tensor of that length is ``cut`` first: into what lies before the share, its pieces, and what
    lies behind.
    """

    def __init__(self, rows: Sequence[Tensor], *, rank: int) -> None:
        members, count = len(rows), rows[0].numel()
        begin, end = bounds(count, rank, members)
        own, others = rows[rank], [row for member, row in enumerate(rows) if member != rank]
        self._rank = rank
        self._others = list(zip(*(row[begin:end].split(PIECE) for row in others), strict=True))
        pieces = [piece.numel() for piece in own[begin:end].split(PIECE)]
        self._cuts = [begin, *pieces, count - end]
        outside = ((0, own[:begin]), (-1, own[end:]))
        self._outside = [(cut, place) for cut, place in outside if place.numel()]

    def cut(self, flat: Tensor) -> Sequence[Tensor]:
        """``flat`` in pieces."""
        return flat.split(self._cuts)

    def copy_in(self, cuts: Sequence[Tensor]) -> None:
        """Puts here what the others will reduce."""
        for cut, place in self._outside:
            place.copy_(cuts[cut])

    def copy_out(self, cuts: Sequence[Tensor]) -> None:
        """Takes from here what the others have reduced."""
        for cut, place in self._outside:
            cuts[cut].copy_(place)

    def reduce(self, given: Sequence[Tensor], into: Sequence[Tensor], kind: str) -> None:
        """Pieces of the share: what this member gives, and where it gets the result."""
        rank = self._rank
        for mine, result, others in zip(given, into, self._others, strict=True):
            accumulate([*others[:rank], mine, *others[rank:]], kind, result)
            for other in others:
                other.copy_(result)


def bounds(count: int, rank: int, members: int) -> tuple[int, int]:
    """From which to which of ``count`` elements the share of a member goes."""
    return count * rank // members, count * (rank + 1) // members


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
        first = ctypes.addressof(self._start) + LINE * (1 + 2 * members)
        every = [ctypes.c_void_p(first + LINE * member) for member in range(members)]
        self._mine = every[rank]
        self._others = every[:rank] + every[rank + 1 :]
        if rank == 0:
            for semaphore in every:
                _libc.sem_init(semaphore, 1, 0)

    @staticmethod
    def size(members: int) -> int:
        """Bytes: a line for the mark of an end; for each member two of words, and a semaphore."""
        return LINE * (1 + 3 * members)

    def arrive(self, said: Said | None = None) -> list[Said]:
        """Returns when all have arrived, with what each of them has said.

        A collective begins with a meeting in which something is said, and that may take long. In
        the others nothing is said, and nobody is far: they are worth a look before sleeping. What
        is said next goes elsewhere: not everybody may have read this by then.

        Raises:
            Interrupted: somebody broke it off.
        """
        self.enter(said)
        return self.leave(said)

    def enter(self, said: Said | None) -> None:
        """The first half of ``arrive``: tells the others."""
        if said is not None:
            _WORDS.pack_into(self._memory, self._place(self._turn) + LINE * self._rank, *said)
            self._turn = 1 - self._turn
        self._check()
        for other in self._others:
            _libc.sem_post(other)

    def leave(self, said: Said | None) -> list[Said]:
        """The second half: waits for them."""
        self.waiting = True
        try:
            for _ in self._others:
                self._wait(spins=said is None or _in_main_thread())
        finally:
            self.waiting = False
        self._check()
        if said is None:
            return []
        begin = self._place(1 - self._turn)
        places = range(begin, begin + LINE * self._members, LINE)
        return [Said(*_WORDS.unpack_from(self._memory, place)) for place in places]

    def break_off(self) -> bool:
        """Ends what the members wait for, now and later; says whether this one did wait."""
        waiting = self.waiting
        self._memory[0] = 1
        for semaphore in (self._mine, *self._others):
            for _ in self._others:
                _libc.sem_post(semaphore)
        return waiting

    def _place(self, turn: int) -> int:
        """From which byte on the words of a turn lie."""
        return LINE * (1 + turn * self._members)

    def _wait(self, *, spins: bool) -> None:
        """Takes a post."""
        if _libc.sem_trywait(self._mine) == 0:
            return
        if spins and self._spin_s:
            began_s = now_s = time.perf_counter()
            while now_s - began_s < self._spin_s:
                if _libc.sem_trywait(self._mine) == 0:
                    return
                now_s = time.perf_counter()
                if now_s - began_s > _ALONE_S:
                    os.sched_yield()
        limit = _Time(int(time.time()) + 1 + _SLICE_S, 0)
        while _libc.sem_timedwait(self._mine, ctypes.byref(limit)) != 0:
            self._check()  # and Python answers signals
            limit.seconds = int(time.time()) + 1 + _SLICE_S

    def _check(self) -> None:
        if self._memory[0]:
            raise RoomInterrupted(MPI.ERR_OTHER)


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
