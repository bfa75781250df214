"""Connections of agents that call: where they are awaited, and what they are then."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torsh_trainer.errors import ResourceError
from torsh_trainer.hosts.interfaces import list_interfaces
from torsh_trainer.launchers.messages import Inbox, Sender
from torsh_trainer.launchers.remote.calling import HOME, TOKEN, prove
from torsh_trainer.launchers.remote.connection import AgentConnection, MarkedInbox, close_all

_POLL_S = 0.1
_BACKLOG = 1024

Ended = Callable[[], ResourceError | None]
"""Why whoever starts the agents has ended; None while it runs."""


class SocketConnection(AgentConnection):
    """An agent that has called."""

    def __init__(
        self, host: str, inbox: Inbox, sender: Sender, *, silence_s: float, ended: Ended
    ) -> None:
        self._ended = ended
        super().__init__(host, inbox, sender, silence_s=silence_s)

    def take(self) -> None:
        super().take()
        if self._lost is None and not self._closing.is_set():
            self._lost = self._ended()

    def explain_end(self) -> ResourceError:
        ended = None if self._closing.is_set() else self._ended()
        return ended or ResourceError(
            f"{self.host}: the process that mpirun had started there is gone",
            fix="see whether the host is up, and what its log says (dmesg)",
            host=self.host,
        )

    def hang_up(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._inbox.fd)) as end:
            end.shutdown(socket.SHUT_WR)
        self._sender.close()

    def close(self) -> None:
        self.hang_up()
        os.close(self._inbox.fd)


@dataclass(frozen=True)
class Reception:
    """Where agents call, and the secret by which they and the launcher know each other."""

    listener: socket.socket
    token: str
    places: str

    @property
    def variables(self) -> dict[str, str]:
        """What an agent has to have in its environment."""
        return {HOME: self.places, TOKEN: self.token}

    def await_calls(
        self,
        is_complete: Callable[[list[SocketConnection]], bool],
        *,
        until_s: float,
        silence_s: float,
        ended: Ended,
    ) -> list[SocketConnection]:
        """The agents, once all have called.

        Raises:
            ResourceError: not all came in time, or whoever starts them has ended.
        """
        found: list[SocketConnection] = []
        try:
            while not is_complete(found):
                called = self._take_call(silence_s=silence_s, ended=ended)
                if called is not None:
                    found.append(called)
                elif (error := ended()) is not None:
                    raise error
                elif time.monotonic() > until_s:
                    raise ResourceError(
                        f"only {len(found)} of the processes that mpirun was to start have called "
                        f"this launcher at {self.places}",
                        fix="open TCP from the hosts to this one, or see what keeps mpirun; "
                        "launcher.startup_timeout_s waits longer",
                    )
        except BaseException:
            close_all(found)
            raise
        return found

    def _take_call(self, *, silence_s: float, ended: Ended) -> SocketConnection | None:
        try:
            end, place = self.listener.accept()
        except TimeoutError:
            return None
        if not prove(end, self.token.encode(), called=True):
            end.close()
            return None
        descriptor = end.detach()
        inbox, sender = MarkedInbox(descriptor), Sender(os.dup(descriptor))
        inbox.marked = True
        name = str(place[0])
        return SocketConnection(name, inbox, sender, silence_s=silence_s, ended=ended)


@contextlib.contextmanager
def open_reception(*, alone: bool) -> Iterator[Reception]:
    """A place to call at: on the loopback where all agents run here, else on every interface."""
    address = "127.0.0.1" if alone else ""
    with socket.create_server((address, 0), backlog=_BACKLOG) as listener:
        listener.settimeout(_POLL_S)
        own = [one.address for one in list_interfaces() if one.is_up and one.address]
        outward = [name for name in own if not name.startswith("127.")]
        names = ["127.0.0.1"] if alone else [*outward, "127.0.0.1"]
        places = f"{','.join(names)}:{listener.getsockname()[1]}"
        yield Reception(listener, secrets.token_hex(32), places)
