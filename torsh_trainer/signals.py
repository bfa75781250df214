"""Signals as a value that the loop reads between steps."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

STOPPING = ("SIGINT", "SIGTERM", "SIGUSR1")
PATIENCE_S = 0.5


class Signals:
    """Within the block, the first stopping signal is remembered; a later SIGINT interrupts.

    One that follows within ``PATIENCE_S`` is an echo (a terminal and a wrapper may both send it).

    SIGUSR1 is what SLURM sends ahead of its time limit (``--signal=USR1@60``). Off the main thread,
    where Python allows no handlers, nothing is caught and ``received`` stays 0.
    """

    def __init__(self) -> None:
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
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._received_s = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self._received_s + PATIENCE_S:
            raise KeyboardInterrupt
