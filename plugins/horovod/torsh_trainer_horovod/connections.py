"""The connections among processes, and how whoever waits hears that one of them is lost.

gloo tells who waits for a process that the connection to it is closed, and nothing else. Horovod's
thread notices a lost process at once, and ends. But Horovod 0.28.1 does not close its connections
then: the context of a process set is never enabled, and ``GlooContext::Finalize`` passes over what
is not. Of two processes the other one is lost anyway; of three, those that are left wait for one
another until ``HOROVOD_GLOO_TIMEOUT_SECONDS`` are over, in ``hvd.shutdown`` as well. And who waits
in a group of the trainer's own, or for a note in a store, does not hear of Horovod's end.

So connections are closed from outside, for both sides.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOOK_S = 0.5
"""How often it is looked whether Horovod still runs."""

PATIENCE_S = 5.0
"""How long after Horovod's end this process may notice by itself, or come to its own end."""


class Connections:
    """The connections that were made between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: set[int] | None = None
        self._held: list[socket.socket] = []

    def begin(self) -> None:
        """From here on connections are made."""
        with self._lock:
            self._before = _sockets()

    def end(self) -> None:
        """They are made; without ``begin`` nothing happens."""
        with self._lock:
            if self._before is not None:
                self._held += _connections(_sockets() - self._before)
            self._before = None

    @contextlib.contextmanager
    def connect(self) -> Iterator[None]:
        """Within, connections are made."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def cut(self) -> None:
        """Ends them for both sides; whoever waits at either end gets an error."""
        with self._lock:
            made = [] if self._before is None else _connections(_sockets() - self._before)
            for connection in (*self._held, *made):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for connection in made:
                connection.close()

    def let_go(self) -> None:
        """Forgets them."""
        with self._lock:
            for connection in self._held:
                connection.close()
            self._held = []


class ConnectionWatch:
    """Cuts connections once Horovod has ended by itself.

    Its own at once, which nobody needs any more; those of the trainer's ``group`` when this process
    has had time to leave by itself. ``close`` it before Horovod is ended on purpose.
    """

    def __init__(self, hvd: Any, horovods: Connections, group: Connections) -> None:
        self._hvd = hvd
        self._horovods = horovods
        self._group = group
        self._over = threading.Event()
        threading.Thread(target=self._look, name="torsh-horovod-watch", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _look(self) -> None:
        while runs(self._hvd):
            if self._over.wait(LOOK_S):
                return
        self._horovods.cut()
        patience_s = PATIENCE_S
        while not self._over.wait(patience_s):
            self._group.cut()
            patience_s = LOOK_S  # what is made meanwhile leads nowhere


def runs(hvd: Any) -> bool:
    """Whether Horovod's thread is at work; ``hvd.is_initialized`` stays true when it has failed."""
    try:
        # Private, for want of another way; Horovod 0.28.1 is what the build makes.
        hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    except (ValueError, RuntimeError):
        return False
    return True


def _sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself is closed by now
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                found.add(int(path.name))
    return found


def _connections(numbers: set[int]) -> list[socket.socket]:
    """The connections among these descriptors, each under another one that is ours to close."""
    found = []
    for number in numbers:
        with contextlib.suppress(OSError):  # another thread has closed it meanwhile
            one = socket.socket(fileno=os.dup(number))
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.close()  # one that listens: gloo ends the process when it is shut down
            else:
                found.append(one)
    return found
