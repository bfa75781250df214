"""mpirun's ports, kept to this host: a job on one host wants nobody else's connections.

Open MPI's mpirun listens on every interface, and has no setting for it. Its sockets are bound to
the loopback device from outside, by the process that has started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from pathlib import Path

_PIDFD_GETFD = 438
"""The number of the system call, the same on every architecture of Linux."""


def confine(pid: int) -> None:
    """Has the listening sockets of process ``pid``, a child, take connections of this host alone.

    Where the kernel does not allow it (before Linux 5.7, or a ptrace scope of 2), they stay.
    """
    if not hasattr(os, "pidfd_open"):
        return
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            for number in _sockets(pid):
                _bind(handle, number)
        finally:
            os.close(handle)


def _sockets(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            if str(path.readlink()).startswith("socket:"):
                found.append(int(path.name))
    return found


def _bind(handle: int, number: int) -> None:
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, number, 0)
    if descriptor < 0:
        return
    with socket.socket(fileno=descriptor) as found:
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and found.family in (socket.AF_INET, socket.AF_INET6):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
