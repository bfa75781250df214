"""What a worker tells its parent: one pickle after another through a pipe.

A message is a tuple: ``("ready",)``, ``("answer", bytes)`` or ``("failure", Failure)``.
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct(">Q")
_CHUNK = 1 << 16


class Sender:
    """The worker's end; used from any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        """Writes one message; silent when the parent is gone."""
        data = pickle.dumps(message)
        view = memoryview(_LENGTH.pack(len(data)) + data)
        with self._lock:
            try:
                while view:
                    view = view[os.write(self._fd, view) :]
            except BrokenPipeError:
                return  # the leash ends this process in a moment


class Inbox:
    """The parent's end: a descriptor that is never waited on here."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._buffer = bytearray()

    def receive(self) -> Iterator[tuple[Any, ...]]:
        """The messages that have arrived in full."""
        self._read()
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield pickle.loads(message)

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                return
            self._buffer += chunk
