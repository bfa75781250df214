"""Ctrl-C in a sweep whose jobs run side by side: they save before they go.

joblib kills its processes when the one that started them is interrupted. So this one waits, and
hands the signal on; what a job answers comes back to it like any other result.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator

from omegaconf import DictConfig

from torsh_trainer.errors import Interrupted
from torsh_trainer.utils.signals import Signals

_stopped: list[Interrupted] = []
"""What stopped a job of this process: it begins no other."""


def side_by_side(launcher: DictConfig) -> bool:
    """Whether Hydra's ``launcher`` has jobs run in processes that end with this one."""
    return "joblib" in str(launcher.get("_target_"))


@contextlib.contextmanager
def jobs_save_first(launcher: DictConfig) -> Iterator[None]:
    """Around a sweep: the first signal to stop goes to the jobs; a second Ctrl-C ends them at once.

    Raises:
        SystemExit: it was interrupted, and the jobs have ended; with the exit code of that.
    """
    if not side_by_side(launcher):
        yield
        return
    with Signals(_hand_on) as signals:
        try:
            yield
        except Exception:  # such as a sweeper's that is left without any result
            if not signals.received:
                raise
    if signals.received:
        raise SystemExit(128 + signals.received)


def _hand_on(number: int) -> None:
    print("stopping: the jobs save; Ctrl-C again ends them at once", file=sys.stderr)
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # it has just ended
            os.kill(child.pid or 0, number)


def earlier_stop() -> Interrupted | None:
    """What stopped an earlier job of this process."""
    return _stopped[0] if _stopped else None


def remember(error: Interrupted) -> Interrupted:
    """``error``, which stops the jobs that this process was still to run."""
    _stopped.append(error)
    return error
