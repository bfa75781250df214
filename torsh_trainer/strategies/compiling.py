"""A word when torch.compile makes a run wait: it says nothing itself, for half a minute or more."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Compilations that together take less go without a word."""
_APART_S = 60.0
"""Those that are further apart have nothing to do with each other."""


class Told:
    """Is told when compilations begin and end, in one process; says once that the run waits."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._taken_s = 0.0
        self._began_s = self._ended_s = 0.0
        self._said = False
        self._timer: threading.Timer | None = None

    def begin(self, *_: Any) -> None:
        """A compilation begins."""
        self._began_s = time.monotonic()
        if self._began_s - self._ended_s > _APART_S:
            self._taken_s, self._said = 0.0, False
        if not self._said:
            self._timer = threading.Timer(max(0.0, self._patience_s - self._taken_s), self._say)
            self._timer.daemon = True
            self._timer.start()

    def end(self, *_: Any) -> None:
        """It has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ended_s = time.monotonic()
        self._taken_s += self._ended_s - self._began_s

    def _say(self) -> None:
        self._said = True
        log.warning(
            "torch.compile compiles the model, and the run waits for it: half a minute is usual, "
            "several minutes for a large one; trainer.compile=false goes without"
        )


_told: Told | None = None


def tell_of_compilations() -> None:
    """From now on a run that waits for torch.compile is told so; costs a step nothing."""
    global _told  # noqa: PLW0603  # torch has one handler a process
    if _told is None:
        # Imported here: it takes a second, and few runs compile.
        from torch._dynamo.callback import callback_handler

        _told = Told()
        callback_handler.register_start_callback(_told.begin)
        callback_handler.register_end_callback(_told.end)
