"""How each collective is carried out over torch.distributed, once all ranks have asked for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm.adasum import adasum
from torsh_trainer.comm.base import Communicator
from torsh_trainer.dropin.negotiation.requests import (
    ADASUM,
    AVERAGE,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Decision,
    Request,
)

_TORCH = {
    SUM: dist.ReduceOp.SUM,
    AVERAGE: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}


@dataclass
class Collective:
    """What this rank has asked for: ``inputs``, and ``outputs`` where they become the result.

    ``outputs`` that are the ``inputs`` are worked on in place; a collective whose result has a size
    that only all ranks know makes them itself. ``launched`` is set once ``works`` are under way, or
    ``error`` is known; ``finish`` is called after them, by who waits.
    """

    request: Request
    inputs: list[Tensor]
    outputs: list[Tensor]
    single: bool = True
    ready: Any = None
    launched: threading.Event = field(default_factory=threading.Event)
    works: Sequence[Any] = ()
    finish: Callable[[], None] | None = None
    error: BaseException | None = None
    received: Tensor | None = None
    value: int = -1

    def end(self) -> None:
        """What is left to do once ``works`` have ended."""
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()

    def result(self) -> Any:
        """What Horovod's ``synchronize`` gives for it."""
        kind = self.request.kind
        if kind in ("barrier", "join"):
            return None if kind == "barrier" else self.value
        if kind == "alltoall":
            return self.outputs[0], self.received
        return self.outputs[0] if self.single else tuple(self.outputs)


@dataclass(frozen=True)
class Members:
    """The processes of a process set as they communicate: ``rank`` is this one's number among them.

    ``host`` moves tensors of the host, ``device`` those of an accelerator.
    """

    ranks: tuple[int, ...]
    rank: int
    host: Communicator
    device: Communicator

    def comm(self, request: Request) -> Communicator:
        """The communicator for the tensors of ``request``."""
        return self.host if request.device == "cpu" else self.device


def scale(tensor: Tensor, factor: float) -> None:
    """``tensor`` times ``factor``, in place; integers are cut to the integer, as Horovod does."""
    if factor == 1.0:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def can_fuse(first: Decision, other: Decision) -> bool:
    """Whether two reductions may travel as one message."""
    a, b = first.request, other.request
    kinds = {dtype for each in (a, b) for dtype, _ in each.parts}
    return (
        a.kind == b.kind == "allreduce"
        and not (first.error or other.error)
        and len(kinds) == 1
        and (a.op, a.prescale, a.postscale, a.members, a.device)
        == (b.op, b.prescale, b.postscale, b.members, b.device)
    )


def reduce_all(operations: Sequence[Collective], members: Members) -> None:
    """Reduces the tensors of all operations, which ``can_fuse`` has found alike, together.

    A single tensor is reduced where it lies; several are copied into one buffer and back.
    """
    request = operations[0].request
    size = len(members.ranks)
    after = request.postscale / size if request.op == AVERAGE else request.postscale
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for operation in operations:
        for given, out in zip(operation.inputs, operation.outputs, strict=True):
            by_dtype.setdefault(given.dtype, []).append((given, out))
    works: list[Any] = []
    finishes: list[Callable[[], None]] = []
    for pairs in by_dtype.values():
        buffer, finish = _collect(pairs, after)
        scale(buffer, request.prescale)
        if request.op == ADASUM:
            adasum(buffer, members.comm(request), layers=[given.numel() for given, _ in pairs])
        elif size > 1 and buffer.numel():
            group = members.comm(request).process_group
            works.append(dist.all_reduce(buffer, _TORCH[request.op], group=group, async_op=True))
        finishes.append(finish)
    ending = _Once(works, finishes)
    for operation in operations:
        operation.works = works
        operation.finish = ending


class _Once:
    """What ends a reduction of several operations, done by the first who waits for one of them."""

    def __init__(self, works: Sequence[Any], steps: Sequence[Callable[[], None]]) -> None:
        self._works = works
        self._steps = list(steps)
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            steps, self._steps = self._steps, []
            _run_all(steps)


def _collect(
    pairs: Sequence[tuple[Tensor, Tensor]], after: float
) -> tuple[Tensor, Callable[[], None]]:
    """One tensor that holds all inputs, and what writes it into the outputs at the end."""
    if len(pairs) == 1:
        given, out = pairs[0]
        if given is not out:
            out.copy_(given)
        return out.view(-1), lambda: scale(out, after)
    sizes = [given.numel() for given, _ in pairs]
    buffer = torch.cat([given.reshape(-1) for given, _ in pairs])

    def write_back() -> None:
        scale(buffer, after)
        slices = buffer.split(sizes)
        torch._foreach_copy_(
            [out for _, out in pairs],
            [part.view_as(out) for part, (_, out) in zip(slices, pairs, strict=True)],
        )

    return buffer, write_back


def gather_all(operation: Collective, decision: Decision, members: Members) -> None:
    """Every member's rows one after another; how many each has, all have told before."""
    size = len(members.ranks)
    group = members.comm(operation.request).process_group
    works, finishes = [], []
    outputs: list[Tensor] = []
    for at, given in enumerate(operation.inputs):
        rows = [each[at] for each in decision.by_rank]
        shape = given.shape[1:]
        output = given.new_empty((sum(rows), *shape))
        outputs.append(output)
        if output.numel() == 0:
            continue
        if size == 1:
            output.copy_(given)
        elif len(set(rows)) == 1:
            works.append(
                dist.all_gather_single(_rows(output), _rows(given), group=group, async_op=True)
            )
        else:
            padded = given.new_zeros((max(rows), *shape))
            padded[: given.shape[0]] = given
            whole = given.new_empty((size, max(rows), *shape))
            into = _rows(whole.flatten(0, 1))
            works.append(dist.all_gather_single(into, _rows(padded), group=group, async_op=True))
            finishes.append(_trim(output, whole, rows))
    operation.outputs = outputs
    operation.works = works
    operation.finish = lambda: _run_all(finishes)


def _rows(tensor: Tensor) -> Tensor:
    """``tensor`` as a matrix; backends that do not know 16-bit integers move bytes."""
    matrix = tensor.view(tensor.shape[0], math.prod(tensor.shape[1:]))
    return matrix.view(torch.uint8) if tensor.dtype == torch.int16 else matrix


def _run_all(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()


def _trim(output: Tensor, whole: Tensor, rows: Sequence[int]) -> Callable[[], None]:
    def trim() -> None:
        torch.cat([part[:count] for part, count in zip(whole, rows, strict=True)], out=output)

    return trim


def broadcast(operation: Collective, decision: Decision, members: Members) -> None:
    """The root's tensor on every member."""
    (given,), (out,) = operation.inputs, operation.outputs
    root = operation.request.root
    if given is not out and members.ranks[members.rank] == root:
        out.copy_(given)
    if len(members.ranks) > 1 and out.numel():
        group = members.comm(operation.request).process_group
        flat = _rows(out.view(1, -1))
        operation.works = [dist.broadcast(flat, root, group=group, async_op=True)]


def exchange(operation: Collective, decision: Decision, members: Members) -> None:
    """Member i's rows for this one, in the order of the members."""
    (given,) = operation.inputs
    sent = decision.by_rank[members.rank]
    taken = [each[members.rank] for each in decision.by_rank]
    output = given.new_empty((sum(taken), *given.shape[1:]))
    operation.outputs = [output]
    operation.received = torch.tensor(taken, dtype=torch.int32)
    rows = given[: sum(sent)].contiguous()
    if len(members.ranks) == 1:
        output.copy_(rows)
    elif math.prod(given.shape[1:]):
        group = members.comm(operation.request).process_group
        operation.works = [
            dist.all_to_all_single(
                _rows(output), _rows(rows), taken, list(sent), group=group, async_op=True
            )
        ]


def reduce_scatter(operation: Collective, decision: Decision, members: Members) -> None:
    """This member's rows of the sum; the first members have one more where it does not divide."""
    size, request = len(members.ranks), operation.request
    group = members.comm(request).process_group
    after = request.postscale / size if request.op == AVERAGE else request.postscale
    works, finishes, outputs = [], [], []
    for given in operation.inputs:
        whole = given.clone()
        scale(whole, request.prescale)
        if size > 1 and whole.numel():
            works.append(dist.all_reduce(whole, group=group, async_op=True))
        share, more = divmod(given.shape[0], size)
        rank = members.rank
        begin = rank * share + min(rank, more)
        mine = whole[begin : begin + share + (rank < more)]
        outputs.append(torch.empty_like(mine))
        finishes.append(_copy_scaled(outputs[-1], mine, after))
    operation.outputs = outputs
    operation.works = works
    operation.finish = lambda: _run_all(finishes)


def _copy_scaled(output: Tensor, source: Tensor, factor: float) -> Callable[[], None]:
    def copy_scaled() -> None:
        output.copy_(source)
        scale(output, factor)

    return copy_scaled


LAUNCH: dict[str, Callable[[Collective, Decision, Members], None]] = {
    "allgather": gather_all,
    "broadcast": broadcast,
    "alltoall": exchange,
    "reducescatter": reduce_scatter,
}
"""How the collectives are begun that never travel together."""
