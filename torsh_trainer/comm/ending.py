"""The end of a process group whose collectives are done, and of Python after it.

A thread of gloo lets go of an operation's tensors a moment after the operation is complete, and
needs Python for it. Two things must not happen in that moment. Python must not end: the process
aborts ("terminate called without an active exception") and a rank that has done all its work counts
as failed. And DDP must not be what owns the group last: it frees the group holding Python's lock,
waits there for the thread, and the thread waits for the lock, for ever. Destroying the group waits
for those threads only if nothing else holds it; a model in DDP, a device mesh or a variable of a
script does.

A rank that has failed waits for nobody. Destroying a group of NCCL flushes what is under way first,
and the others, who wait in it for this rank, never end it: such a group is aborted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

log = logging.getLogger(__name__)

_THREADS = "pt_gloo_runloop"  # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
_PAUSE_S = 0.002
_LIMIT_S = 1.0
_BLIND_S = 0.02
"""Where threads cannot be seen (there is no /proc), all that can be done is to give them time."""
_ABANDON_S = 1.5
"""So long a rank that has failed waits for its own group to let go."""
_EXIT_S = 10.0
"""So long the end of Python may take where a group did not let go."""


def settle() -> None:
    """Gives the threads of gloo time to let go; returns at once when there are none.

    A thread that still waits for another rank sleeps as well, so a failing job is not held up.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        time.sleep(_BLIND_S)
        return
    threads = [task for task in tasks.iterdir() if _name(task) == _THREADS]
    deadline = time.monotonic() + _LIMIT_S
    at_rest = 0 if threads else 2
    while at_rest < 2 and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)  # without the GIL: a thread that waits for it runs now
        at_rest = at_rest + 1 if all(map(_sleeps, threads)) else 0


def destroy(process_group: Any = None) -> None:
    """``torch.distributed.destroy_process_group`` when the threads of gloo have let go."""
    settle()
    dist.destroy_process_group(process_group)


def abandon(process_group: Any) -> None:
    """Leaves a group whose other members may wait for this one, which has failed.

    Takes seconds at most. Where the group does not let go by then, Python's end is bounded, too.
    """
    nccl = "nccl" in str(dist.get_backend(process_group)).lower()
    left = threading.Event()

    def leave() -> None:
        try:
            if nccl:
                dist.distributed_c10d._abort_process_group(process_group)
            else:
                destroy(process_group)
        except RuntimeError as error:  # the failure that is told is the one that came before
            log.debug("the process group could not be left: %s", error)
        left.set()

    threading.Thread(target=leave, name="torsh-leave", daemon=True).start()
    if not left.wait(_ABANDON_S):
        atexit.register(_end_in_time)


def _end_in_time() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _EXIT_S)


def _name(task: Path) -> str:
    with contextlib.suppress(OSError):
        return (task / "comm").read_text().strip()
    return ""


def _sleeps(task: Path) -> bool:
    with contextlib.suppress(OSError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"
    return True
