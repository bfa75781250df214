"""Signals as a value that the loop reads between steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from torsh_trainer.errors import Interrupted

STOPPING = ("SIGINT", "SIGTERM", "SIGUSR1")
PATIENCE_S = 0.5

_ends_with_its_run = False


def ends_with_its_run() -> None:
    """Says that this process has one run to do, and ends when that is stopped.

    A launcher hands a signal to one process after another, and the ranks agree on their stop as
    soon as one has it: to the others it may come when they have saved and left. It is old news
    then, and is ignored, where by default it would kill a process that is saying how it went.
    """
    global _ends_with_its_run  # noqa: PLW0603  # one process, one run
    _ends_with_its_run = True


class Signals:
    """Within the block, the first stopping signal is remembered; a later SIGINT interrupts.

    ``then`` is called with the number of the first.

    Afterwards the handlers are as before; but see ``ends_with_its_run``.

    One that follows within ``PATIENCE_S`` is an echo (a terminal and a wrapper may both send it).

    SIGUSR1 is what SLURM sends ahead of its time limit (``--signal=USR1@60``). Off the main thread,
    where Python allows no handlers, nothing is caught and ``received`` stays 0.
    """

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self._then = then
        self.received = 0
        self._received_s = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for name in STOPPING:
                number = getattr(signal, name, None)  # Windows has no SIGUSR1
                if number is not None:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stopped = kind is not None and issubclass(kind, Interrupted)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if stopped and _ends_with_its_run else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._received_s = number, time.monotonic()
            if self._then is not None:
                self._then(number)
        elif number == signal.SIGINT and time.monotonic() > self._received_s + PATIENCE_S:
            raise KeyboardInterrupt


def signal_name(number: int) -> str:
    """A signal in words: ``Ctrl-C (SIGINT)``."""
    name = signal.Signals(number).name
    return f"Ctrl-C ({name})" if number == signal.SIGINT else name
