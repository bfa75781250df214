"""A worker as its job sees it: what it has told so far, and how it ended."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.launchers.failures import Failure
from torsh_trainer.launchers.logs import tail
from torsh_trainer.launchers.transport import WorkerHandle
from torsh_trainer.utils.user_code import place_in

log = logging.getLogger(__name__)

SIGBUS_HINT = "shared memory is usually full: fewer data workers, or a larger /dev/shm"


@dataclass(eq=False)
class Worker:
    """A process, and what it has told so far; ``speaks`` where its output is the parent's."""

    rank: int
    speaks: bool
    handle: WorkerHandle
    log: Path
    ready: bool = False
    answer: bytes | None = None
    failure: Failure | None = None
    ended: bool = False

    def listen(self) -> None:
        """Takes what has arrived, and notices the end of the process."""
        code = self.handle.exit_code()
        for message in self.handle.receive():
            match message:
                case ("ready",):
                    self.ready = True
                case ("answer", answer):
                    self.answer = answer
                case ("failure", failure):
                    self.failure = failure
        if code is not None and not self.ended:
            self.ended = True
            if self.answer is None and self.failure is None:
                self.failure = self._death(code)
            elif self.answer is not None and code != 0:
                log.warning("rank %d finished, then ended with %s", self.rank, _exit_words(code))

    def signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if not self.ended:
            self.handle.send_signal(number)

    def last_words(self) -> str:
        """The stack that faulthandler wrote, of a crash or of a hang."""
        return self.handle.last_words()

    def _death(self, code: int) -> Failure:
        hint = {-signal.SIGKILL: self.handle.explain_kill, -signal.SIGBUS: lambda: SIGBUS_HINT}
        output = "its last output is above" if self.speaks else f"its last output is in {self.log}"
        fix = "; ".join(filter(None, [hint.get(code, str)(), output]))
        on = f" on {self.handle.place}" if self.handle.place else ""
        lost, way_out = self.handle.explain_loss()
        if lost:
            sentence, fix = lost, way_out
        elif code < 0:
            place = place_in(self.last_words())
            at = f" at {place}" if place else ""
            sentence = f"rank {self.rank}{on} was killed by {_exit_words(code)}{at}"
        else:
            sentence = f"rank {self.rank}{on} ended before it was done, with {_exit_words(code)}"
        return Failure(
            self.rank,
            time.monotonic(),
            sentence,
            fix=fix,
            traceback=self.last_words() or tail(self.log),
            worded=True,
        )


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
