"""The end of a process group whose collectives are done, and of Python after it.

A thread of gloo lets go of an operation's tensors a moment after the operation is complete, and
needs Python for it. Two things must not happen in that moment. Python must not end: the process
aborts ("terminate called without an active exception") and a rank that has done all its work counts
as failed. And DDP must not be what owns the group last: it frees the group holding Python's lock,
waits there for the thread, and the thread waits for the lock, for ever. Destroying the group waits
for those threads only if nothing else holds it; a model in DDP, a device mesh or a variable of a
script does.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

_THREADS = "pt_gloo_runloop"  # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
_PAUSE_S = 0.002
_LIMIT_S = 1.0
_BLIND_S = 0.02
"""Where threads cannot be seen (there is no /proc), all that can be done is to give them time."""


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


def _name(task: Path) -> str:
    with contextlib.suppress(OSError):
        return (task / "comm").read_text().strip()
    return ""


def _sleeps(task: Path) -> bool:
    with contextlib.suppress(OSError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"
    return True
