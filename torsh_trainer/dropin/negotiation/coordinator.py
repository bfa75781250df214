"""The one who knows what every rank has asked for, and says what is done next; without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torsh_trainer.dropin.negotiation.requests import ALL, Decision, Request

ENDED = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt "
    "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution. If "
    "the shutdown was caused by an exception, you should see the exception in the log before the "
    "shutdown message."
)
_WITHOUT_JOIN = {
    "allgather": "Allgather is not supported with Join at this time. Specify sparse_to_dense=True "
    "if using DistributedOptimizer",
    "broadcast": "Broadcast is not supported with Join at this time.",
    "alltoall": "Alltoall is not supported with Join at this time.",
    "reducescatter": "Reducescatter is not supported with Join at this time.",
}
JOIN = Request("join", "join")


@dataclass
class _Waiting:
    """What some members have asked for and others not yet."""

    since_s: float
    requests: dict[int, Request] = field(default_factory=dict)


class Coordinator:
    """Puts the requests of all ranks in one order.

    A collective is ready when every member of its process set has asked for it by name, or has
    joined. What becomes ready first is done first, on every rank.
    """

    def __init__(self, size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._clock = clock
        self._waiting: dict[tuple[int, str], _Waiting] = {}
        self._joined: list[int] = []
        self._members: dict[int, tuple[int, ...]] = {ALL: tuple(range(size))}
        self._ended = False

    def add_members(self, number: int, ranks: Sequence[int]) -> None:
        """Makes the process set ``number`` known."""
        self._members[number] = tuple(ranks)

    def submit(self, rank: int, requests: Sequence[Request]) -> list[Decision]:
        """What ``rank`` asks for, and what all ranks are to do because of it."""
        decisions = []
        for request in requests:
            if self._ended:
                decisions.append(Decision(request, error=ENDED, ended=True))
                continue
            key = (request.members, request.name)
            waiting = self._waiting.setdefault(key, _Waiting(self._clock()))
            waiting.requests[rank] = request
            decisions += self._settle(key, waiting)
        return decisions

    def join(self, rank: int) -> list[Decision]:
        """``rank`` has no more to reduce, and contributes zeros until all have joined."""
        if self._ended:
            return [Decision(JOIN, error=ENDED, ended=True)]
        self._joined.append(rank)
        decisions = []
        for key, waiting in list(self._waiting.items()):
            decisions += self._settle(key, waiting)
        if len(self._joined) == self._size:
            decisions.append(Decision(JOIN, value=rank))
            self._joined.clear()
        return decisions

    def leave(self) -> list[Decision]:
        """A rank is gone: nothing that waits can ever be done, and nothing else either."""
        if self._ended:
            return []
        self._ended = True
        requests = [next(iter(each.requests.values())) for each in self._waiting.values()]
        self._waiting.clear()
        joins = [JOIN] if self._joined else []
        return [Decision(each, error=ENDED, ended=True) for each in [*requests, *joins]]

    def find_stalled(self, after_s: float) -> Iterator[tuple[str, list[int], float]]:
        """What has waited for longer: its name, the ranks that it lacks, for how long."""
        for (members, name), waiting in self._waiting.items():
            age_s = self._clock() - waiting.since_s
            if age_s >= after_s:
                ranks = self._members.get(members, ())
                missing = [r for r in ranks if r not in waiting.requests and r not in self._joined]
                yield name, missing, age_s

    def _settle(self, key: tuple[int, str], waiting: _Waiting) -> list[Decision]:
        members = self._members.get(key[0], ())
        if any(r not in waiting.requests and r not in self._joined for r in members):
            return []
        del self._waiting[key]
        requests = [waiting.requests[r] for r in members if r in waiting.requests]
        first = requests[0]
        error = find_mismatch(requests)
        if not error and len(requests) < len(members):
            error = _WITHOUT_JOIN.get(first.kind, "")
        return [Decision(first, _rows(requests), error=error)]


def _rows(requests: Sequence[Request]) -> tuple[tuple[int, ...], ...]:
    if requests[0].kind == "allgather":
        return tuple(tuple(shape[0] for _, shape in r.parts) for r in requests)
    if requests[0].kind == "alltoall":
        return tuple(request.splits for request in requests)
    return ()


def find_mismatch(requests: Sequence[Request]) -> str:
    """In what the members of a collective contradict each other, in Horovod's words; else empty."""
    first, *others = requests
    for other in others:
        if words := _compare(first, other):
            return words
    return ""


def _compare(a: Request, b: Request) -> str:
    kind = a.kind.upper()
    if a.kind != b.kind:
        return (
            f"Mismatched collective operations: One rank did an {kind}, but another rank did an "
            f"{b.kind.upper()}."
        )
    if len(a.parts) != len(b.parts):
        return (
            f"Mismatched group sizes: One rank sent {len(a.parts)} tensors, but another rank sent "
            f"{len(b.parts)}."
        )
    for (dtype, shape), (other_dtype, other_shape) in zip(a.parts, b.parts, strict=True):
        if dtype != other_dtype:
            return (
                f"Mismatched data types: One rank had type {dtype}, but another rank had type "
                f"{other_dtype}."
            )
        if words := _compare_shapes(a.kind, shape, other_shape):
            return f"Mismatched {kind} tensor shapes: {words}"
    if a.op != b.op:
        return (
            f"Mismatched reduction operation: One rank sent reduction op {a.op}, but another rank "
            f"sent reduction op {b.op}."
        )
    if (a.prescale, a.postscale) != (b.prescale, b.postscale):
        return (
            "Mismatched prescale and/or postscale factors: One rank sent factors "
            f"({a.prescale:g}, {a.postscale:g}), but another rank sent factors "
            f"({b.prescale:g}, {b.postscale:g})."
        )
    if a.root != b.root:
        return (
            f"Mismatched {kind} root ranks: One rank specified root rank {a.root}, but another "
            f"rank specified root rank {b.root}."
        )
    if a.device != b.device:
        return (
            f"Mismatched {kind} CPU/GPU device selection: One rank specified device "
            f"{a.device.upper()}, but another rank specified device {b.device.upper()}."
        )
    return ""


def _compare_shapes(kind: str, a: Sequence[int], b: Sequence[int]) -> str:
    if kind not in ("allgather", "alltoall"):
        if a == b:
            return ""
        return (
            f"One rank sent a tensor of shape {list(a)}, but another rank sent a tensor of shape "
            f"{list(b)}."
        )
    if len(a) != len(b):
        return (
            f"One rank sent a tensor of rank {len(a)}, but another rank sent a tensor of rank "
            f"{len(b)}."
        )
    for at in range(1, len(a)):
        if a[at] != b[at]:
            return (
                f"One rank sent a tensor with dimension {at} equal to {a[at]}, but another rank "
                f"sent a tensor with dimension {at} equal to {b[at]}."
            )
    return ""
