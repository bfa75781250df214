"""One process's part of the collectives: what it has asked for, and what is under way."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.dropin.negotiation.connection import Client, Server, StallCheck
from torsh_trainer.dropin.negotiation.coordinator import JOIN
from torsh_trainer.dropin.negotiation.operations import (
    LAUNCH,
    Collective,
    Members,
    can_fuse,
    reduce_all,
)
from torsh_trainer.dropin.negotiation.requests import ALL, Decision, Request

_BURST_S = 0.001
"""Requests that follow one another this closely go to rank 0, and travel, together."""


class EndedError(ConnectionError):
    """Another process has ended, or has shut Horovod down."""


class DuplicateNameError(ValueError):
    """Two collectives under one name at the same time."""


class CollectiveEngine:
    """Collectives by name among all processes of ``comm``.

    ``host`` are the same processes where ``comm`` moves no memory of the host (NCCL). A request is
    carried out once all members have made it, on a thread of its own, in one order everywhere.
    """

    def __init__(self, comm: Communicator, host: Communicator, *, stalls: StallCheck) -> None:
        self._comm = comm
        self.world = comm.world
        ranks = tuple(range(comm.size))
        self._sets = {ALL: Members(ranks, comm.rank, host, comm)}
        self._numbers = itertools.count(1)
        self._table: dict[tuple[int, str], Collective] = {}
        self._lock = threading.Lock()
        self._held: list[Request] = []
        self._timer: threading.Timer | None = None
        self._join: Collective | None = None
        self._lent: list[Any] = []
        self._over: BaseException | None = None
        self._server, connection = _connect(comm, stalls)
        self._client = Client(
            comm.rank,
            connection,
            server=self._server,
            on_decisions=self._carry_out,
            on_end=self._end,
        )

    # -- process sets ----------------------------------------------------------------------------

    def members(self, number: int) -> Members:
        """The process set of that number; of all processes with 0."""
        return self._sets[number]

    def add_members(self, ranks: Sequence[int]) -> int:
        """The number of a new process set; every process of the job calls it alike."""
        whole = self._sets[ALL]
        device = whole.device.split(ranks)
        host = device if whole.host is whole.device else split_host(self._comm, ranks)
        number = next(self._numbers)
        if self._server is not None:
            self._server.add_members(number, ranks)
        if host is not None and device is not None:
            rank = list(ranks).index(self._comm.rank)
            self._sets[number] = Members(tuple(ranks), rank, host, device)
        self._comm.barrier()  # nobody asks within the set before rank 0 knows it
        return number

    # -- operations ------------------------------------------------------------------------------

    def submit(self, operation: Collective, *, at_once: bool = False) -> Collective:
        """Asks for it. Without ``at_once`` it may wait a moment for others to go with.

        Raises:
            DuplicateNameError: one of that name is under way.
        """
        request = operation.request
        if request.device != "cpu":
            operation.ready = torch.cuda.Event()
            operation.ready.record(torch.cuda.current_stream(operation.inputs[0].device))
        with self._lock:
            if self._over is not None:
                operation.error = self._over
                operation.launched.set()
                return operation
            key = (request.members, request.name)
            if key in self._table:
                raise DuplicateNameError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name "
                    "as another tensor that is currently being processed.  If you want to request "
                    f"another tensor, use a different tensor name. Tensor name: {request.name}"
                )
            self._table[key] = operation
            self._held.append(request)
            if not at_once and self._timer is None:
                self._timer = threading.Timer(_BURST_S, self.flush)
                self._timer.daemon = True
                self._timer.start()
        if at_once:
            self.flush()
        return operation

    def flush(self) -> None:
        """Sends what has been held back."""
        with self._lock:
            held, self._held = self._held, []
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if held:
            self._client.submit(held)

    def wait(self, operation: Collective) -> Any:
        """The result of ``operation``, once it is there.

        Raises:
            EndedError: a process is gone that it would need.
            RuntimeError: it failed, or ranks contradict one another.
        """
        if not operation.launched.is_set():
            if self._held:
                self.flush()
            operation.launched.wait()
        if operation.error is not None:
            raise operation.error
        for work in operation.works:
            work.wait()
        operation.end()
        return operation.result()

    def is_done(self, operation: Collective) -> bool:
        """Whether ``wait`` would return at once."""
        if self._held:
            self.flush()
        if not operation.launched.is_set():
            return False
        if operation.error is not None:
            return True
        if not all(work.is_completed() for work in operation.works):
            return False
        operation.end()
        return True

    def join(self) -> int:
        """The rank that came last, once all have come; until then this one contributes zeros."""
        self.flush()
        operation = Collective(JOIN, [], [])
        with self._lock:
            if self._over is not None:
                raise self._over
            self._join = operation
        self._client.join()
        answer: int = self.wait(operation)
        for work in self._lent:
            work.wait()
        self._lent.clear()
        return answer

    def close(self) -> None:
        """Leaves; whoever still waits for this process is told that it is gone."""
        self._client.close()
        self._end()

    # -- on the thread of the client -------------------------------------------------------------

    def _carry_out(self, decisions: list[Decision]) -> None:
        at = 0
        while at < len(decisions):
            together = [decisions[at]]
            while at + len(together) < len(decisions) and can_fuse(
                together[0], decisions[at + len(together)]
            ):
                together.append(decisions[at + len(together)])
            at += len(together)
            self._do(together)

    def _do(self, decisions: Sequence[Decision]) -> None:
        """Begins what all of ``decisions`` say, which is one thing, or several that go together."""
        first = decisions[0]
        if first.ended:
            self._over = EndedError(first.error)
        if first.request.members not in self._sets:
            return  # among others
        operations = [self._take(decision) for decision in decisions]
        try:
            if first.error:
                raise EndedError(first.error) if first.ended else RuntimeError(first.error)
            self._launch(operations, first)
        except Exception as error:  # noqa: BLE001 - who waits for it gets it
            for operation in operations:
                operation.error = error
        for operation in operations:
            operation.launched.set()

    def _launch(self, operations: Sequence[Collective], decision: Decision) -> None:
        request = decision.request
        if request.kind == "join":
            operations[0].value = decision.value
            return
        if request.kind == "barrier":
            return
        for operation in operations:
            if operation.ready is not None:
                stream = torch.cuda.current_stream(operation.inputs[0].device)
                stream.wait_event(operation.ready)
        members = self._sets[request.members]
        if request.kind == "allreduce":
            reduce_all(operations, members)
        else:
            LAUNCH[request.kind](operations[0], decision, members)

    def _take(self, decision: Decision) -> Collective:
        """This process's own operation of that name, or zeros where it has joined."""
        request = decision.request
        with self._lock:
            if request.kind == "join":
                operation, self._join = self._join, None
                return operation or Collective(JOIN, [], [])
            found = self._table.pop((request.members, request.name), None)
        if found is not None:
            return found
        device = self._comm.device if request.device != "cpu" else torch.device("cpu")
        zeros = [torch.zeros(shape, dtype=_DTYPES[d], device=device) for d, shape in request.parts]
        lent = Collective(request, zeros, zeros)
        self._lent.append(_Lent(lent))
        return lent

    def _end(self) -> None:
        """Nothing will be done any more."""
        with self._lock:
            if self._over is None:
                self._over = EndedError("rank 0 has ended")
            waiting = [*self._table.values(), *([self._join] if self._join else [])]
            self._table.clear()
            self._join = None
        for operation in waiting:
            operation.error = self._over
            operation.launched.set()


class _Lent:
    """The part of a process that has joined in what others do."""

    def __init__(self, operation: Collective) -> None:
        self._operation = operation

    def wait(self) -> None:
        for work in self._operation.works:
            work.wait()


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    )
}


def describe(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """A tensor as a part of a request."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _connect(comm: Communicator, stalls: StallCheck) -> tuple[Server | None, socket.socket]:
    """Rank 0's server, on rank 0, and each process's connection to it."""
    if comm.rank:
        host, port, token = comm.broadcast_object(None, src=0)
        connection = socket.create_connection((host, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token + comm.rank.to_bytes(4, "big"))
        comm.barrier()
        return None, connection
    meeting = comm.world.rendezvous
    address = "127.0.0.1" if meeting is None else meeting.address
    local = address in ("127.0.0.1", "localhost", "::1")
    listener = socket.create_server(("127.0.0.1" if local else "", 0), backlog=comm.size)
    token = os.urandom(16)
    host = "127.0.0.1" if local else address
    if comm.size > 1:
        comm.broadcast_object((host, listener.getsockname()[1], token), src=0)
    server = Server(comm.size, stalls=stalls)
    theirs, mine = socket.socketpair()
    server.start(theirs, listener, token)
    if comm.size > 1:
        comm.barrier()
    return server, mine


def split_host(comm: Communicator, ranks: Sequence[int]) -> Communicator | None:
    """The processes ``ranks`` of ``comm`` over gloo, which moves memory of the host.

    Every process of ``comm`` calls it; None on those outside.
    """
    group = dist.new_group(list(ranks), backend="gloo")
    return comm.part_of(group) if comm.rank in ranks else None
