"""What a worker tells its parent: one pickle after another through a pipe.

A message is a tuple: ``("ready",)``, ``("answer", bytes)`` or ``("failure", Failure)``.
"""

from __future__ import annotations

import os
import pickle
import select
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
                if self._fd < 0:
                    return
                while view:
                    view = self._write(view)
            except (BrokenPipeError, ConnectionError):
                return  # the leash ends this process in a moment

    def close(self, *, patience_s: float = 0.5) -> bool:
        """Closes the descriptor, and sends nothing any more; False while a send waits for the other
        end to read."""
        if not self._lock.acquire(timeout=patience_s):
            return False
        try:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
        finally:
            self._lock.release()
        return True

    def _write(self, view: memoryview) -> memoryview:
        """What is left to write. The descriptor may be one that is also read from, unblocked."""
        try:
            return view[os.write(self._fd, view) :]
        except BlockingIOError:
            select.select([], [self._fd], [])
            return view


class Inbox:
    """The parent's end: a descriptor that is never waited on here; ``ended`` once it is closed."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.ended = False
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
            except ConnectionError:
                chunk = b""
            if not chunk:
                self.ended = True
                return
            self._buffer += chunk
