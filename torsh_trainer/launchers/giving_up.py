"""The end of a process whose own thread may never come back: it says why, and is gone.

A call into a device that waits for another rank cannot be interrupted, and Python's handlers of
signals wait for it. So another thread ends the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

from torsh_trainer.errors import TrainingError
from torsh_trainer.launchers.failures import exit_code_of, failure_of
from torsh_trainer.launchers.inside import report_failure
from torsh_trainer.utils.foreign import readable
from torsh_trainer.utils.masking import mask_text

log = logging.getLogger(__name__)


def give_up(error: BaseException, *, rank: int) -> None:
    """Ends this process at once with the words and the exit code of ``error``."""
    if not report_failure(error, rank=rank):
        failure = failure_of(error, rank=rank, time_s=time.monotonic())
        words = TrainingError(failure.sentence, fix=failure.fix or "debug=true shows the traceback")
        print(f"error: {readable(mask_text(str(words)))}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code_of(error))


@contextlib.contextmanager
def give_up_unless(
    error: BaseException, *, rank: int, done_within_s: float | None
) -> Iterator[None]:
    """``give_up`` where the block takes longer; None lets it take its time."""
    if done_within_s is None:
        yield
        return
    done = threading.Event()

    def wait() -> None:
        if not done.wait(done_within_s):
            log.error("callbacks did not come to an end within %g s", done_within_s)
            give_up(error, rank=rank)

    threading.Thread(target=wait, name="torsh-give-up", daemon=True).start()
    try:
        yield
    finally:
        done.set()
