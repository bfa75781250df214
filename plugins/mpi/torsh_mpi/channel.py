"""Collectives on plain tensors: one MPI communicator, contiguous memory, blocking calls.

Everything above this (order, waiting, staging) is elsewhere. A count in MPI is a C int, so what is
larger travels in pieces (reductions) or as one element of a derived datatype (all else).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from mpi4py import MPI
from torch import Tensor

from torsh_mpi.agreement import Agreement
from torsh_mpi.numbers import AVG, CODES, NATIVE, Reduction, combine
from torsh_mpi.parts import Parts, open_parts
from torsh_mpi.shared import MIN_COUNT, STAGED_COUNT, Room, open_room
from torsh_mpi.staging import synchronise

LARGEST_COUNT = 2**31 - 1
SMALL_BYTES = 1 << 16
"""Up to here, what MPI cannot reduce is gathered by every rank and reduced there, in one step."""
_UNIT_BYTES = 1 << 20

Spec = list[object]


class Channel:
    """The members of ``comm`` exchanging contiguous tensors that MPI can reach.

    Every method blocks until this member's part is done, and is called by all members in one
    order. ``largest_count`` is MPI's limit; tests lower it. With an ``agreement`` (see there),
    members on one host reduce what is large in memory that they share.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        agreement: Agreement | None = None,
        *,
        largest_count: int = LARGEST_COUNT,
    ) -> None:
        self.comm = comm
        self._agreement = agreement
        self._room: Room | None = None
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._largest = largest_count

    # -- reductions -----------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Reduces ``tensor`` over all members, in place."""
        kind = reduction.kind
        if reduction.factor is not None:
            tensor.mul_(reduction.factor)
        count = tensor.numel()
        # The same on every member, so all of them meet in the same place.
        if count >= MIN_COUNT and (tensor.dtype, kind) in CODES and tensor.is_cpu:
            room = self._room if count < STAGED_COUNT else self.room()
            if room is not None and room.wants(count) and room.all_reduce(tensor, kind):
                return
        native = NATIVE.get((tensor.dtype, kind))
        if native is None:
            self._all_reduce_here(tensor, kind)
            return
        datatype, operation = native
        if count <= self._largest:
            self.comm.Allreduce(MPI.IN_PLACE, [_memory(tensor), count, datatype], operation)
        else:
            for piece in self._pieces(tensor):
                self.comm.Allreduce(MPI.IN_PLACE, _buffer_spec(piece, datatype), operation)
        if kind == AVG:
            tensor.div_(self.size)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction) -> None:
        """As ``all_reduce``, but only ``root`` gets the result; the others keep their tensor."""
        native = NATIVE.get((tensor.dtype, reduction.kind))
        receives = self.rank == root
        if native is None:
            mine = tensor if receives else tensor.clone()
            self.all_reduce(mine, reduction)
            return
        given = tensor
        if reduction.factor is not None:
            given = tensor.mul_(reduction.factor) if receives else tensor * reduction.factor
        for piece in self._pieces(given):
            spec = _buffer_spec(piece, native[0])
            if receives:
                self.comm.Reduce(MPI.IN_PLACE, spec, native[1], root)
            else:
                self.comm.Reduce(spec, None, native[1], root)
        if receives and reduction.kind == AVG:
            tensor.div_(self.size)

    def reduce_scatter(self, output: Tensor, given: Tensor, reduction: Reduction) -> None:
        """``output`` becomes the reduction of everybody's part ``rank`` of ``given``."""
        if reduction.factor is not None:
            given = given * reduction.factor
        native = NATIVE.get((output.dtype, reduction.kind))
        if native is None:
            self._reduce_scatter_here(output, given, reduction.kind)
            return
        datatype, operation = native
        if given.numel() <= self._largest:
            count = output.numel()  # mpi4py wants the count of one part on both sides
            self.comm.Reduce_scatter_block(
                [_memory(given), count, datatype], [_memory(output), count, datatype], operation
            )
        else:
            for root, part in enumerate(given.view(self.size, -1).unbind()):
                self._reduce_to(output, part, root, native)
        if reduction.kind == AVG:
            output.div_(self.size)

    def reduce_scatter_uneven(
        self, output: Tensor, given: Tensor, counts: Sequence[int], reduction: Reduction
    ) -> None:
        """As ``reduce_scatter``, with ``counts[r]`` elements for member r."""
        for root, part in enumerate(given.split(list(counts))):
            mine = part.clone()
            self.reduce(mine, root, reduction)
            if root == self.rank:
                output.view(-1).copy_(mine)

    def _reduce_to(
        self, output: Tensor, part: Tensor, root: int, native: tuple[MPI.Datatype, MPI.Op]
    ) -> None:
        pieces = zip(self._pieces(part), self._pieces(output), strict=True)
        for given, taken in pieces:
            into = _buffer_spec(taken, native[0]) if root == self.rank else None
            self.comm.Reduce(_buffer_spec(given, native[0]), into, native[1], root)

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` zeros, where all members can reach them if there is such a place."""
        room = self.room()
        if count < MIN_COUNT or room is None:
            return torch.zeros(count, dtype=dtype)
        return room.zeros(count, dtype)

    def shares(self, count: int) -> bool:
        """Whether ``zeros`` of so many elements have such a place; the same on every member."""
        return self.room() is not None and count >= MIN_COUNT

    def stage(self, count: int, dtype: torch.dtype) -> None:
        """Makes ready for reducing tensors of so many elements again and again."""
        room = self.room()
        if count >= MIN_COUNT and room is not None:
            room.stage(count, dtype)

    def common(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """``count`` zeros that all members read and write, or None on all of them."""
        room = self.room()
        return None if room is None else room.common(count, dtype)

    def parts(self, sizes: Sequence[int], dtype: torch.dtype, kind: str) -> Parts | None:
        """See there; None, on all members, where they share no memory or it is not worth it."""
        room = self.room()
        if room is None or sum(sizes) < MIN_COUNT or (dtype, kind) not in CODES:
            return None
        return open_parts(room, sizes, dtype, kind)

    def room(self) -> Room | None:
        """Where members on one host meet; opened, by all together, when it is first wanted."""
        if self._agreement is not None:
            self._room = open_room(self.comm, self._agreement)
            self._agreement = None
        return self._room

    def break_off(self) -> bool:
        """Ends a wait in the room, and says whether there was one; MPI's calls go on."""
        return self._room is not None and self._room.gate.break_off()

    # -- reductions that MPI does not have: exchange the parts, let torch reduce them -----------

    def _all_reduce_here(self, tensor: Tensor, kind: str) -> None:
        count, size = tensor.numel(), self.size
        if count == 0:
            return
        flat = tensor.view(-1)
        if tensor.nbytes * size <= SMALL_BYTES:
            parts = flat.new_empty(size, count)
            self.all_gather(parts, flat)
            flat.copy_(combine(parts, kind))
            return
        # As a ring would: each rank reduces its share and hands it round. The same bytes travel.
        share = -(-count // size)
        whole = flat
        if share * size != count:
            whole = flat.new_zeros(share * size)
            whole[:count] = flat
        parts = flat.new_empty(size, share)
        self.all_to_all(parts, whole)
        self.all_gather(whole, combine(parts, kind))
        if whole is not flat:
            flat.copy_(whole[:count])

    def _reduce_scatter_here(self, output: Tensor, given: Tensor, kind: str) -> None:
        parts = torch.empty_like(given).view(self.size, -1)
        self.all_to_all(parts, given)
        output.view(-1).copy_(combine(parts, kind))

    # -- moving ---------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Every member's ``tensor`` becomes that of ``root``."""
        self.comm.Bcast(self._bytes(tensor), root)

    def all_gather(self, output: Tensor, given: Tensor) -> None:
        """``output`` becomes everybody's ``given``, one after the other."""
        self.comm.Allgather(self._bytes(given), self._bytes(output, self.size))

    def all_to_all(self, output: Tensor, given: Tensor) -> None:
        """Part i of ``output`` becomes member i's part ``rank`` of ``given``; equal sizes."""
        self.comm.Alltoall(self._bytes(given, self.size), self._bytes(output, self.size))

    def all_to_all_uneven(
        self, output: Tensor, given: Tensor, takes: Sequence[int], gives: Sequence[int]
    ) -> None:
        """As ``all_to_all``, with ``takes[i]`` elements from member i and ``gives[i]`` to it."""
        if max(sum(takes), sum(gives)) > self._largest:
            parts = zip(output.view(-1).split(list(takes)), range(self.size), strict=True)
            sent = zip(given.view(-1).split(list(gives)), range(self.size), strict=True)
            self._exchange(list(parts), list(sent))
            return
        element = _element(output.element_size())
        self.comm.Alltoallv(
            [_memory(given), (list(gives), _starts(gives)), element],
            [_memory(output), (list(takes), _starts(takes)), element],
        )

    def gather(self, outputs: Sequence[Tensor], given: Tensor, root: int) -> None:
        """``outputs``, on ``root`` alone, become everybody's ``given``; sizes may differ."""
        taken = [(part, member) for member, part in enumerate(outputs)]
        self._exchange(taken if self.rank == root else [], [(given, root)])

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """``output`` becomes part ``rank`` of what ``root`` has; sizes may differ."""
        sent = [(part, member) for member, part in enumerate(inputs)]
        self._exchange([(output, root)], sent if self.rank == root else [])

    def barrier(self) -> None:
        """Returns once every member has called it."""
        if self._room is None:
            self.comm.Barrier()
        else:
            self._room.meet()

    # -- one to one -----------------------------------------------------------------------------

    def isend(self, tensor: Tensor, to: int, tag: int) -> MPI.Request:
        """Begins to send; the tensor stays as it is until the request is done."""
        return self.comm.Isend(self._bytes(tensor), to, tag)

    def irecv(self, tensor: Tensor, source: int | None, tag: int) -> MPI.Request:
        """Begins to receive; ``source`` None is whoever sends."""
        return self.comm.Irecv(
            self._bytes(tensor), MPI.ANY_SOURCE if source is None else source, tag
        )

    def _exchange(
        self, takes: Sequence[tuple[Tensor, int]], gives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Pairwise messages, on a tag that no caller of send and recv can have."""
        tag = _tag_of_exchanges()
        requests = [self.comm.Irecv(self._bytes(t), member, tag) for t, member in takes]
        requests += [self.comm.Isend(self._bytes(t), member, tag) for t, member in gives]
        MPI.Request.Waitall(requests)

    # -- memory ---------------------------------------------------------------------------------

    def _pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        if tensor.numel() <= self._largest:
            yield tensor
        else:
            yield from tensor.view(-1).split(self._largest)

    def _bytes(self, tensor: Tensor, parts: int = 1) -> Spec:
        """``tensor`` as a message of bytes, cut into ``parts`` equal ones."""
        count = tensor.nbytes // parts
        if count <= self._largest:
            return [_memory(tensor), count, MPI.BYTE]
        return [_memory(tensor), 1, _block(count)]


def _memory(tensor: Tensor) -> MPI.buffer:
    if not tensor.is_cpu:
        synchronise(tensor)  # MPI knows nothing of streams
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _buffer_spec(tensor: Tensor, datatype: MPI.Datatype) -> Spec:
    return [_memory(tensor), tensor.numel(), datatype]


def _starts(counts: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts


@cache
def _element(size: int) -> MPI.Datatype:
    """A datatype of so many bytes, so that counts are those of elements."""
    return MPI.BYTE.Create_contiguous(size).Commit()


@cache
def _block(size: int) -> MPI.Datatype:
    """A datatype of so many bytes that no count could name."""
    units, rest = divmod(size, _UNIT_BYTES)
    unit = MPI.BYTE.Create_contiguous(_UNIT_BYTES)
    return MPI.Datatype.Create_struct(
        [units, rest], [0, units * _UNIT_BYTES], [unit, MPI.BYTE]
    ).Commit()


@cache
def _tag_of_exchanges() -> int:
    bound = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert isinstance(bound, int), "the standard promises one"
    return bound
