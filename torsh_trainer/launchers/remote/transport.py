"""The transport over connections to agents: a worker is a number at the other end of one."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Any, Literal

from torsh_trainer.errors import ResourceError
from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.remote.connection import AgentConnection, copy_descriptor
from torsh_trainer.launchers.remote.paths import split_path
from torsh_trainer.launchers.transport import (
    Transport,
    TransportFactory,
    WorkerHandle,
    WorkerStart,
)

log = logging.getLogger(__name__)

UNKILLABLE_S = 15.0
LOST_CODE = 255
"""As ssh says that a connection was lost."""

Shown = Literal["rank_zero", "all"]


@dataclass(frozen=True)
class AgentSeat:
    """Where a worker is started: behind which connection, and what it has beside its own variables.

    ``threads`` 0 divides the cores of the host among its workers.
    """

    connection: AgentConnection
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0


class AgentTransport(Transport):
    """Starts each worker at its seat; whoever opened the connections waits for their end."""

    def __init__(self, payload: Payload, *, seats: Sequence[AgentSeat], shown: Shown) -> None:
        front, back = split_path(payload.path)
        try:
            self._payload = pickle.dumps((front, back, replace(payload, path=[])))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ResourceError(
                f"the run cannot be written down for its workers: {error}"
            ) from error
        self._seats, self._shown = seats, shown
        self._given: set[int] = set()

    def start(self, start: WorkerStart) -> WorkerHandle:
        seat = self._seats[start.index]
        connection = seat.connection
        if id(connection) not in self._given:
            self._given.add(id(connection))
            connection.send("payload", self._payload)
        label = f"rank {start.world.rank} ({connection.host})| " if self._shown == "all" else ""
        handle = AgentHandle(start, connection, label=label)
        env = {**start.env, **seat.env}
        connection.send("start", start.index, env, seat.threads, start.output is None)
        return handle

    def close(self) -> None:
        for seat in self._seats:
            seat.connection.hang_up()


def transport_over(seats: Sequence[AgentSeat], *, shown: Shown) -> TransportFactory:
    """What a launcher hands to ``job.run``."""
    return partial(AgentTransport, seats=seats, shown=shown)


class AgentHandle(WorkerHandle):
    """A worker behind a connection. With a ``label`` all that it prints is shown here as well."""

    def __init__(self, start: WorkerStart, connection: AgentConnection, *, label: str) -> None:
        self._index, self._rank = start.index, start.world.rank
        self._connection = connection
        self._label, self._line = label.encode(), b""
        self._descriptor = copy_descriptor(connection)
        self._log: IO[bytes] | None = None
        if start.output is not None:
            try:
                self._log = start.output.open("ab", buffering=0)
            except OSError as error:
                raise ResourceError(
                    f"rank {self._rank} cannot be started: {error}", fix="choose another folder"
                ) from error
        self._messages: deque[tuple[Any, ...]] = deque()
        self._code: int | None = None
        self._words, self._why_killed = "", ""
        self._loss: tuple[str, str] = ("", "")
        self._kills = 0
        connection.attach(self._index, self._hear)

    @property
    def descriptor(self) -> int:
        return self._descriptor

    @property
    def place(self) -> str:
        return self._connection.host

    def receive(self) -> Iterator[tuple[Any, ...]]:
        self._connection.take()
        while self._messages:
            yield self._messages.popleft()

    def exit_code(self) -> int | None:
        self._connection.take()
        lost = self._connection.lost
        if lost is not None and self._code is None:
            self._code = LOST_CODE
            self._loss = (f"rank {self._rank} is lost with its host: {lost.sentence}", lost.fix)
        return self._code

    def send_signal(self, number: int) -> None:
        if self._code is None:
            self._connection.send("signal", self._index, int(number))

    def kill(self) -> None:
        wanted, end_s = self._kills + 1, time.monotonic() + UNKILLABLE_S
        self._connection.send("kill", self._index)
        while self._kills < wanted and self._connection.lost is None:
            if time.monotonic() > end_s:
                log.warning("rank %d hangs in the kernel of %s", self._rank, self.place)
                return
            self._connection.wait(0.1)
            self._connection.take()

    def last_words(self) -> str:
        self._connection.take()
        return self._words

    def explain_kill(self) -> str:
        return self._why_killed

    def explain_loss(self) -> tuple[str, str]:
        return self._loss

    def close(self) -> None:
        self._connection.attach(self._index, lambda *_: None)  # others may still be heard there
        self._print_label_of(b"\n" if self._line else b"")
        os.close(self._descriptor)
        if self._log is not None:
            self._log.close()

    def _hear(self, what: str, *values: Any) -> None:
        match what, values:
            case "told", (message,):
                if message[0] == "failure":  # clocks of hosts have nothing to do with each other
                    message = ("failure", replace(message[1], time_s=time.monotonic()))
                self._messages.append(message)
            case "printed", (stream, data):
                self._print(stream, data)
            case "words", (text,):
                self._words = text
            case "ended", (code, why):
                self._code, self._why_killed = code, why
            case "refused", (sentence, fix):
                self._code = LOST_CODE
                self._loss = (f"{self.place}: {sentence}", fix)
            case "killed", ():
                self._kills += 1

    def _print(self, stream: str, data: bytes) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk, as for a worker of this host
                self._log.write(data)
        if self._label:
            self._print_label_of(data)
        elif self._log is None:
            _write(2 if stream == "err" else 1, data)

    def _print_label_of(self, data: bytes) -> None:
        """Whole lines with the label, on this process's own output."""
        *lines, self._line = (self._line + data).split(b"\n")
        if lines:
            _write(1, b"".join(self._label + line + b"\n" for line in lines))


def _write(descriptor: int, data: bytes) -> None:
    """As a worker of this host would; a reader that is gone ends nothing."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(descriptor, view) :]
