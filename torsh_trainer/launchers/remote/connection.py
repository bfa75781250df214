"""The near end of a connection to an agent: what it is asked, told and heard of its workers."""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torsh_trainer.errors import ResourceError
from torsh_trainer.launchers.messages import Inbox, Sender
from torsh_trainer.launchers.remote.agent import BEAT_S, MARK

log = logging.getLogger(__name__)

_POLL_S = 0.1
_SAID_BYTES = 4096

Hear = Callable[..., None]
"""Takes one message of a worker, without the worker's number."""


class MarkedInbox(Inbox):
    """Messages that begin behind ``MARK``; ``said`` is the end of what came before it."""

    said = b""
    marked = False

    def receive(self) -> Any:
        if not self.marked:
            self._read()
            before, mark, after = bytes(self._buffer).partition(MARK)
            self.marked = bool(mark)
            self._buffer[:] = after if mark else before[-len(MARK) :]
            self.said = (self.said + before)[-_SAID_BYTES:] if mark else self.said + before
        if self.marked:
            yield from super().receive()


class AgentConnection(abc.ABC):
    """A connection to the agent on ``host``; used from one thread.

    It is lost once it has ended, or nothing has come through it for ``silence_s``.
    """

    def __init__(self, host: str, inbox: Inbox, sender: Sender, *, silence_s: float) -> None:
        self.host = host
        self._inbox, self._sender = inbox, sender
        self._silence_s = silence_s
        self._hearing: dict[int, Hear] = {}
        self._answers: deque[dict[str, Any]] = deque()
        self._heard_s: float | None = None
        self._lost: ResourceError | None = None
        self._closing = threading.Event()
        # A thread: this process may be busy elsewhere, and a beat may wait where nobody reads.
        threading.Thread(target=self._beat, name=f"beat-{host}", daemon=True).start()

    @property
    def descriptor(self) -> int:
        """Readable when something has arrived."""
        return self._inbox.fd

    @property
    def lost(self) -> ResourceError | None:
        """Why the agent is not heard any more; None while it is."""
        return self._lost

    @abc.abstractmethod
    def explain_end(self) -> ResourceError:
        """Why the connection has ended."""

    @abc.abstractmethod
    def hang_up(self) -> None:
        """Ends the connection, without waiting for the other end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for the end of the other end, a while, and gives everything back."""

    def send(self, *message: Any) -> None:
        """Tells the agent something; without effect once the connection is lost."""
        if self._lost is None:
            self._sender.send(*message)

    def attach(self, index: int, hear: Hear) -> None:
        """Hands to ``hear`` what is heard of the worker ``index``."""
        self._hearing[index] = hear

    def ask(self, what: str, *, timeout_s: float, **values: Any) -> dict[str, Any]:
        """The answer to a question.

        Raises:
            ResourceError: the host gives none, or refuses; says which host, and why.
        """
        (answer,) = ask_all([self], what, [values], timeout_s=timeout_s)
        if "refused" in answer:
            raise ResourceError(f"{self.host}: {answer['refused']}", fix=answer.get("fix", ""))
        return answer

    def take_answer(self, deadline_s: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            ResourceError: none comes before ``deadline_s``, or the connection is lost.
        """
        started_s = time.monotonic()
        while not self._answers:
            self.take()
            if self._answers:
                break
            if self._lost is not None:
                raise self._lost
            if time.monotonic() > deadline_s:
                raise ResourceError(
                    f"{self.host}: no answer within {deadline_s - started_s:.0f} s",
                    fix="launcher.startup_timeout_s allows more time",
                )
            self.wait(_POLL_S)
        return self._answers.popleft()

    def wait(self, timeout_s: float) -> None:
        """Waits until something may have arrived."""
        if self._lost is None:
            select.select([self._inbox.fd], [], [], timeout_s)

    def take(self) -> None:
        """Takes what has arrived; notices when nothing does any more."""
        if self._lost is not None:
            return
        heard = False
        for message in self._inbox.receive():
            heard = True
            self._sort(*message)
        self._notice_end(heard=heard)

    def _notice_end(self, *, heard: bool) -> None:
        """Counts the connection as lost where it has ended, or says nothing for too long."""
        if self._lost is not None:
            return
        now_s = time.monotonic()
        if heard or self._heard_s is None:
            self._heard_s = now_s if heard else None
        if self._inbox.ended:
            self._lost = self.explain_end()
        elif self._heard_s is not None and now_s - self._heard_s > self._silence_s:
            self._lost = ResourceError(
                f"{self.host}: nothing was heard of it for {self._silence_s:g} s: the host is "
                "down, or the link to it",
                fix=f"ping {self.host.rpartition('@')[2]}; launcher.silence_s waits longer",
            )

    def _sort(self, what: str, *rest: Any) -> None:
        if what == "answer":
            self._answers.append(rest[0])
        elif what == "leaving":
            self._lost = ResourceError(
                f"{self.host}: it heard nothing of this launcher for {rest[0]:g} s, and has ended "
                "its ranks",
                fix="was the launcher stopped (Ctrl-Z), or the link dead? launcher.silence_s waits "
                "longer",
            )
        elif what != "beat":
            index, *values = rest
            if what == "told":
                values = [pickle.loads(values[0])]
            self._hearing[index](what, *values)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            self._sender.send("beat")


def ask_all(
    connections: Sequence[AgentConnection],
    what: str,
    values: Sequence[Mapping[str, Any]],
    *,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """The answers of several agents to a question, which they look into side by side.

    Raises:
        ResourceError: a host gives no answer.
    """
    deadline_s = time.monotonic() + timeout_s
    for connection, each in zip(connections, values, strict=True):
        connection.send("ask", what, dict(each))
    return [connection.take_answer(deadline_s) for connection in connections]


def close_all(connections: Sequence[AgentConnection]) -> None:
    """Ends several connections side by side."""
    for connection in connections:
        connection.hang_up()
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.close()


def copy_descriptor(connection: AgentConnection) -> int:
    """Another number for the descriptor of a connection, which several may wait for."""
    return os.dup(connection.descriptor)
