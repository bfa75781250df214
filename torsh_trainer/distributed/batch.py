"""Several collectives at once: written down first, then begun together and waited for once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.comm.failures import CollectiveArgumentError
from torsh_trainer.distributed import collectives, process_group
from torsh_trainer.distributed.collective_run import CollectiveWork, Op
from torsh_trainer.distributed.process_group import Group, ReduceOp

Table = Mapping[Any, Tensor] | MutableSequence[Tensor] | Sequence[Tensor]


@dataclass(frozen=True)
class _Entry:
    """One operation, and the numbers of the tensors that it reads or writes."""

    words: str
    tensors: tuple[Any, ...]
    begin: Callable[..., CollectiveWork | None]


class CollectiveBatch:
    """Collectives over a table of tensors, begun together.

    Methods name tensors by their place in the table (an index of a list, a key of a mapping) and
    return the batch, so that calls chain::

        batch = CollectiveBatch().all_reduce(0, ReduceOp.SUM).broadcast(1, 0)
        batch.execute(group, tensors)

    On NCCL everything is one group call. Elsewhere all operations are under way at once. Operations
    that touch the same memory keep their order, so the result is that of calling one by one.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def all_reduce(self, tensor: Any, op: Op = ReduceOp.SUM) -> CollectiveBatch:
        """Reduces the tensor over all members, in place."""
        return self._add(
            "all_reduce",
            (tensor,),
            lambda pg, t: collectives.all_reduce(t, op, pg, async_op=True),
        )

    def broadcast(self, tensor: Any, src: int) -> CollectiveBatch:
        """The tensor becomes that of rank ``src``."""
        return self._add(
            "broadcast", (tensor,), lambda pg, t: collectives.broadcast(t, src, pg, async_op=True)
        )

    def reduce(self, tensor: Any, dst: int, op: Op = ReduceOp.SUM) -> CollectiveBatch:
        """Rank ``dst``'s tensor becomes the reduction."""
        return self._add(
            "reduce", (tensor,), lambda pg, t: collectives.reduce(t, dst, op, pg, async_op=True)
        )

    def reduce_scatter(self, input: Any, output: Any, op: Op = ReduceOp.SUM) -> CollectiveBatch:
        """The output becomes this member's part of the reduction of the input."""
        return self._add(
            "reduce_scatter",
            (input, output),
            lambda pg, i, o: collectives.reduce_scatter_tensor(o, i, op, pg, async_op=True),
        )

    def all_gather(self, input: Any, output: Any) -> CollectiveBatch:
        """The output holds the inputs of all members, one after another."""
        return self._add(
            "all_gather",
            (input, output),
            lambda pg, i, o: collectives.all_gather_into_tensor(o, i, pg, async_op=True),
        )

    def all_to_all(self, input: Any, output: Any) -> CollectiveBatch:
        """Parts of the input go to their members, parts of the output come from them."""
        return self._add(
            "all_to_all",
            (input, output),
            lambda pg, i, o: collectives.all_to_all_single(o, i, group=pg, async_op=True),
        )

    def execute(self, group: Group, tensors: Table) -> None:
        """Does all of it; the results are in the tensors when it returns.

        Raises:
            CollectiveArgumentError: the table has no such tensor.
            CommunicationError: an operation failed.
        """
        members = process_group.resolve(group)
        rounds = _rounds([(entry, _look_up(entry, tensors)) for entry in self._entries])
        for operations in rounds:
            with _together(members) as end:
                works = [entry.begin(members, *values) for entry, values in operations]
            end([work for work in works if work is not None])

    def _add(
        self, words: str, tensors: tuple[Any, ...], begin: Callable[..., Any]
    ) -> CollectiveBatch:
        self._entries.append(_Entry(words, tensors, begin))
        return self


NcclBatch = CollectiveBatch
"""The guides' name."""


@contextlib.contextmanager
def _together(
    members: process_group.ProcessGroup,
) -> Iterator[Callable[[Sequence[CollectiveWork]], None]]:
    """One group call of everything that is begun within, where the backend has it.

    Yields what ends the works of that call; it is called after the block.
    """
    call: list[Any] = []
    coalesces = members.is_member and members.backend == "nccl"
    group: Any = members.process_group
    if coalesces:
        group._start_coalescing(members.device)

    def end(works: Sequence[CollectiveWork]) -> None:
        for work in call:
            work.wait()
        for work in works:
            # Within a group call only the whole of it can be waited for.
            work._end() if coalesces else work.wait()

    yield end
    if coalesces:
        # ncclGroupEnd; c10d counts the operations as one piece of work.
        ended = group._end_coalescing(members.device)
        if ended is not None:
            call.append(ended)


def _look_up(entry: _Entry, tensors: Table) -> tuple[Tensor, ...]:
    found = []
    for place in entry.tensors:
        try:
            found.append(tensors[place])
        except (KeyError, IndexError) as error:
            raise CollectiveArgumentError(
                f"{entry.words} names tensor {place!r}, and the table has {len(tensors)}",
                fix="give execute a table with every tensor that the batch names",
            ) from error
    return tuple(found)


def _rounds(
    operations: Sequence[tuple[_Entry, tuple[Tensor, ...]]],
) -> list[list[tuple[_Entry, tuple[Tensor, ...]]]]:
    """Operations that may be under way together: none touches memory that another does."""
    rounds: list[list[tuple[_Entry, tuple[Tensor, ...]]]] = []
    taken: list[tuple[int, int]] = []
    for entry, values in operations:
        spans = [_span(tensor) for tensor in values]
        meets = any(a < end and begin < b for a, b in spans for begin, end in taken)
        if not rounds or meets:
            rounds.append([])
            taken = []
        rounds[-1].append((entry, values))
        taken += spans
    return rounds


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first and the last address that a tensor may touch."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return begin, begin + (last + 1) * tensor.element_size()


def flatten_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """``tensors`` of one dtype as one flat copy, and what writes it back into them."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])

    def write_back() -> None:
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    return flat, write_back
