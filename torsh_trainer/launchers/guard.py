"""A small process beside a worker that ends it soon after its parent, whatever it is doing.

A thread of the worker would have to wait for its turn: while a long call holds the interpreter, or
the machine is busy, that takes seconds. The guard is forked before the worker has imported
anything, sleeps in the kernel until one of the two has ended, and costs a step nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

GRACE_S = 2.0
"""How long a worker whose parent is gone may take to stop by itself."""
_POLL_S = 0.5


class Guard:
    """The guard of this process; ``close`` ends it."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid

    def close(self) -> None:
        """Leaves no process behind to whoever comes after this one."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


def start(*, parent_pid: int, leash: int) -> Guard:
    """Forks the guard of this process, or starts a thread where the kernel has no descriptors of
    processes.

    ``leash`` is a pipe that only the parent can write to: its end of file means that the parent is
    gone.
    """
    try:
        ends = [os.pidfd_open(parent_pid), os.pidfd_open(os.getpid())]
    except (AttributeError, OSError):
        threading.Thread(
            target=_guard_by_thread, args=(leash, parent_pid), name="leash", daemon=True
        ).start()
        return Guard(None)
    if os.getppid() != parent_pid:  # it died before, and another process may have its number
        os.killpg(os.getpgrp(), signal.SIGKILL)
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _close_all_but([leash, *ends])
            _guard(worker, leash, *ends)
        finally:
            os._exit(0)
    for end in ends:
        os.close(end)
    return Guard(pid)


def _guard(worker: int, leash: int, parent: int, own: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the worker
    if own in _wait_for_ends([leash, parent, own]):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGTERM)
    deadline_s = time.monotonic() + GRACE_S
    while (
        own not in _wait_for_ends([own], deadline_s - time.monotonic())
        and time.monotonic() < deadline_s
    ):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _guard_by_thread(leash: int, parent_pid: int) -> None:
    # The parent's number changes when it dies: some other process may hold the leash's far end.
    while not _wait_for_ends([leash], _POLL_S) and os.getppid() == parent_pid:
        pass
    if callable(signal.getsignal(signal.SIGTERM)):  # the entry can stop in good order
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _wait_for_ends(descriptors: list[int], timeout_s: float | None = None) -> list[int]:
    """Those that have come to their end, in so many seconds."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    timeout_ms = None if timeout_s is None else max(0.0, timeout_s) * 1000
    return [found for found, _ in poll.poll(timeout_ms)]


def _close_all_but(kept: list[int]) -> None:
    """What the guard held open would not end when the worker ends."""
    first = 0
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
