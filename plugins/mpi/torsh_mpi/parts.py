"""Tensors of every member, reduced over members together, each as soon as all have put it.

What a member puts it also copies into its own memory, where the others read it; nobody writes into
another's, which would take lines of memory from one processor's cache to the other's twice. At the
end it reduces what everybody has put by then, before it waits for the rest. Nothing is reduced
earlier: backward may still read a gradient that shares its memory with another tensor.

Two members copy everything, and each adds up everything for itself: then they need to meet only
once. Of more members, or of tensors that would take too much memory, each reduces a share, and
takes what the others have reduced.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from torsh_mpi.numbers import CODES, accumulate
from torsh_mpi.shared import LINE, Room, Said, Segments, bounds, differ
from torsh_trainer.comm.failures import CollectiveArgumentError

TWICE_BYTES = 1 << 25
"""Up to so many bytes two members copy everything, into memory of twice that size."""
# These never wait, so they need not let go of Python's lock.
_libc = ctypes.PyDLL(None)


class Posts:
    """How many tensors each member has put, told to each other member by semaphores.

    A post comes after what was written before it, and who takes it sees all that.
    """

    def __init__(self, descriptor: int, *, rank: int, members: int) -> None:
        self._memory = mmap.mmap(descriptor, self.size(members))
        self._start = ctypes.c_char.from_buffer(self._memory)
        first = ctypes.addressof(self._start)
        others = [member for member in range(members) if member != rank]

        def semaphore(sender: int, receiver: int) -> ctypes.c_void_p:
            return ctypes.c_void_p(first + LINE * (sender * members + receiver))

        self._to = [semaphore(rank, other) for other in others]
        self._from = [semaphore(other, rank) for other in others]
        self._taken = [0] * len(others)
        if rank == 0:
            for number in range(members**2):
                _libc.sem_init(ctypes.c_void_p(first + LINE * number), 1, 0)

    @staticmethod
    def size(members: int) -> int:
        """Bytes."""
        return LINE * members**2

    def post(self) -> None:
        """Tells everybody else of one more tensor."""
        for semaphore in self._to:
            _libc.sem_post(semaphore)

    def come(self, count: int) -> bool:
        """Whether everybody else has told of ``count`` tensors."""
        for number, semaphore in enumerate(self._from):
            while self._taken[number] < count:
                if _libc.sem_trywait(semaphore) != 0:
                    return False
                self._taken[number] += 1
        return True

    def forget(self) -> None:
        """Counts from zero again; everything told has been taken."""
        self._taken = [0] * len(self._taken)


class Parts:
    """Tensors of ``sizes`` elements; in each round every member puts all, and then ends it.

    ``kind`` is how they are reduced.
    """

    def __init__(
        self, room: Room, posts: Posts, ways: Sequence[_Way], *, dtype: torch.dtype, kind: str
    ) -> None:
        count = sum(way.count for way in ways)
        self._room = room
        self._posts = posts
        self._ways = ways
        self._kind = kind
        self._words = f"the {kind} of {len(ways)} parts of {count} {dtype} elements"
        # No other meeting of this group has such a code.
        self._said = Said(-1, 0, count, len(CODES) + CODES[dtype, kind])
        self._put: list[Tensor | None] = [None] * len(ways)
        self._told = self._reduced = 0

    def put(self, number: int, values: Tensor) -> None:
        """Takes this member's ``values`` of a tensor, of one dimension; they become the result.

        Raises:
            CollectiveArgumentError: that was done in this round.
        """
        if self._put[number] is not None:
            raise CollectiveArgumentError(
                "a gradient came twice before the ranks had summed it: a backward has failed",
                fix="strategy.overlap=false sums gradients after the whole backward",
            )
        self._put[number] = values
        self._ways[number].give(values)
        count = len(self._ways)
        while self._told < count and self._put[self._told] is not None:
            self._told += 1
            self._posts.post()

    def finish(self) -> None:
        """Returns when what was put is the reduction of what all members have put.

        Raises:
            Interrupted: the wait for the others was broken off.
            MismatchError: they do something else.
        """
        count = len(self._ways)
        assert self._told == count, "everything has been put"
        gate = self._room.gate
        gate.enter(self._said)
        while self._reduced < count and self._posts.come(self._reduced + 1):
            self._reduce()
        if differ(gate.leave(self._said)):
            raise self._room.mismatch(self._words)
        everything = self._posts.come(count)
        assert everything, "all have put what they came with"
        while self._reduced < count:
            self._reduce()
        if self._ways[0].meets_again:
            gate.arrive()
        for number, way in enumerate(self._ways):
            values = self._put[number]
            assert values is not None, "see above"
            way.end(values)
            self._put[number] = None
        self._posts.forget()
        self._told = self._reduced = 0

    def _reduce(self) -> None:
        values = self._put[self._reduced]
        assert values is not None, "it has been told"
        self._ways[self._reduced].reduce(values, self._kind)
        self._reduced += 1


class _Whole:
    """One tensor between two members, each of whom reduces all of it.

    ``rows`` are two places in each member's memory, for rounds in turn: in one round a member may
    still read what another has put in the round before.
    """

    meets_again = False

    def __init__(self, rows: Sequence[Sequence[Tensor]], *, rank: int) -> None:
        self.count = rows[0][0].numel()
        self._rank = rank
        self._rows = [list(places) for places in zip(*rows, strict=True)]

    def give(self, values: Tensor) -> None:
        """Copies ``values`` to where the other finds them."""
        self._rows[0][self._rank].copy_(values)

    def reduce(self, values: Tensor, kind: str) -> None:
        """What both have given, in ``values``."""
        everybody = self._rows[0][:]
        everybody[self._rank] = values
        accumulate(everybody, kind, values)

    def end(self, values: Tensor) -> None:
        """Everything has been reduced here."""
        self._rows.reverse()


class _Shared:
    """One tensor of which each member reduces a share; ``rows`` are a place in each one's memory.

    That of a member's own share is where it puts the result, for the others.
    """

    meets_again = True

    def __init__(self, rows: Sequence[Tensor], *, rank: int) -> None:
        members = range(len(rows))
        self.count = rows[0].numel()
        cuts = [bounds(self.count, member, len(rows)) for member in members]
        self._rank = rank
        self._sizes = [end - begin for begin, end in cuts]
        own = rows[rank]
        self._mine = [own[begin:end] for begin, end in cuts]
        begin, end = cuts[rank]
        self._others = [row[begin:end] for row in rows]  # of this member's share
        self._results = [row[slice(*cut)] for row, cut in zip(rows, cuts, strict=True)]

    def give(self, values: Tensor) -> None:
        """Copies what others reduce to where they find it."""
        for member, cut in enumerate(values.split(self._sizes)):
            if member != self._rank:
                self._mine[member].copy_(cut)

    def reduce(self, values: Tensor, kind: str) -> None:
        """This member's share."""
        share = values.split(self._sizes)[self._rank]
        everybody = self._others[:]
        everybody[self._rank] = share
        accumulate(everybody, kind, share)
        self._mine[self._rank].copy_(share)

    def end(self, values: Tensor) -> None:
        """All members have reduced their shares: takes those of the others."""
        for member, cut in enumerate(values.split(self._sizes)):
            if member != self._rank:
                cut.copy_(self._results[member])


_Way = _Whole | _Shared


def open_parts(room: Room, sizes: Sequence[int], dtype: torch.dtype, kind: str) -> Parts | None:
    """Parts for the members of ``room``, or None on all of them: collective."""
    count = sum(sizes)
    twice = room.members == 2 and count * dtype.itemsize <= TWICE_BYTES
    segments = room.segments(count * dtype.itemsize * (2 if twice else 1))
    posts = room.in_memory(
        Posts.size(room.members),
        lambda descriptor: Posts(descriptor, rank=room.rank, members=room.members),
    )
    if segments is None or posts is None:
        return None
    ways = _ways(room, segments, sizes, dtype, twice=twice)
    return Parts(room, posts, ways, dtype=dtype, kind=kind)


def _ways(
    room: Room, segments: Segments, sizes: Sequence[int], dtype: torch.dtype, *, twice: bool
) -> list[_Way]:
    count = sum(sizes)
    rows = segments.rows(dtype, 2 * count if twice else count)
    rows[room.rank].zero_()  # touched here, so that it is near this member's processor
    ways: list[_Way] = []
    begin = 0
    for size in sizes:
        end = begin + size
        places = [row[begin:end] for row in rows]
        if twice:
            again = [row[count + begin : count + end] for row in rows]
            ways.append(_Whole(list(zip(places, again, strict=True)), rank=room.rank))
        else:
            ways.append(_Shared(places, rank=room.rank))
        begin = end
    return ways
