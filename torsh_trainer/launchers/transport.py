"""The contract of a transport: how a worker is started on its place, watched and ended.

A launcher says which workers a job has (``job.run``); a transport brings each of them to life, on
this machine (``local_transport``) or on another.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_trainer.environments.world import World
from torsh_trainer.launchers.inside import Payload


@dataclass(frozen=True)
class WorkerStart:
    """A worker to start.

    ``index`` is its number among the worlds of the payload, ``world`` its place; ``env`` are all
    the variables that it is to have (on another host, beside those of a login there). ``output``
    takes what it and whatever it starts print, appended; None is where the output of this process
    goes.
    """

    index: int
    world: World
    env: Mapping[str, str]
    output: Path | None = None


class WorkerHandle(abc.ABC):
    """A worker that has been started; used from one thread."""

    @property
    @abc.abstractmethod
    def descriptor(self) -> int:
        """Readable, as ``select`` knows it, when there may be something to receive or the worker
        has ended; the same until ``close``."""

    @abc.abstractmethod
    def receive(self) -> Iterator[tuple[Any, ...]]:
        """The messages of the worker (``launchers.messages``) that have arrived since; never waits.

        What it told before it ended is still received after ``exit_code`` gave its end.
        """

    @abc.abstractmethod
    def exit_code(self) -> int | None:
        """With which code it has ended, below 0 the number of the signal that ended it; None while
        it runs. Never waits."""

    @abc.abstractmethod
    def send_signal(self, number: int) -> None:
        """Sends a signal to the worker; without effect once it has ended."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends the worker at once, and whatever it has started that did not leave its session; the
        worker has ended on return. Works after the worker has ended, too."""

    def last_words(self) -> str:
        """The stack that ``faulthandler`` wrote, of a crash or after SIGUSR2; may be empty."""
        return ""

    def explain_kill(self) -> str:
        """What the place of the worker says of a SIGKILL that ended it; empty for nothing."""
        return ""

    @property
    def place(self) -> str:
        """The host of the worker; empty for this one."""
        return ""

    def explain_loss(self) -> tuple[str, str]:
        """What happened and the next move, where a worker counts as ended because it can no longer
        be reached; empty where the end was its own."""
        return "", ""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what this process holds for the worker, which has been killed."""


class Transport(abc.ABC):
    """Starts the workers of one job; a ``TransportFactory`` makes it of what they are given.

    A worker runs ``launchers.worker`` with the payload. It never outlives this process: it is
    asked to stop, and a moment later killed, when the connection to it breaks.
    """

    @abc.abstractmethod
    def start(self, start: WorkerStart) -> WorkerHandle:
        """Starts one worker, and does not wait for it.

        Raises:
            ResourceError: it cannot be started; says which rank, and why.
        """

    def all_started(self) -> None:  # noqa: B027 - optional
        """No further worker will be started: gives back what only starting needs."""

    @abc.abstractmethod
    def close(self) -> None:
        """Breaks the connection to all workers. All of them have been killed, unless this process
        itself is failing."""


TransportFactory = Callable[[Payload], Transport]
"""What a launcher hands to ``job.run``.

Raises:
    ResourceError: what the workers are given cannot be handed over.
"""
