"""Requests to stop a job, as values."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

PATIENCE_S = 0.5
"""A second SIGINT within this time is an echo of the first (a wrapper that forwards it)."""


@dataclass
class StopSignals:
    """Within the block, requests to stop become values; the handlers before it come back after.

    Off the main thread, where Python allows no handlers, nothing is caught. A signal that is
    ignored (``nohup``, a background job of a shell) stays ignored. SIGUSR1, SLURM's warning ahead
    of the time limit, is passed on, and then given to whoever handled it before.
    """

    stop: int | None = None
    impatient: bool = False
    _stopped_s: float = 0.0
    _pending: list[int] = field(default_factory=list)
    _previous: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                previous = signal.getsignal(number)
                if previous is not signal.SIG_IGN and previous is not None:
                    self._previous[number] = previous
                    signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take(self) -> Iterable[int]:
        """Signals that are to be passed on to the workers, each once."""
        pending, self._pending = self._pending, []
        return pending

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._pending.append(number)
            if callable(previous := self._previous[number]):
                previous(number, frame)
        elif self.stop is None:
            self.stop = number
            self._stopped_s = time.monotonic()
            self._pending.append(number)
        elif number == signal.SIGINT and time.monotonic() > self._stopped_s + PATIENCE_S:
            self.impatient = True
