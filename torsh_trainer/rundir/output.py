"""Standard output that may go away (`| head`, a full disk) and takes no run along."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

log = logging.getLogger(__name__)


@contextlib.contextmanager
def outliving_stdout() -> Iterator[None]:
    """Within the block, standard output that can no longer be written is told once, in the log.

    What is printed from then on is dropped; nothing raises for it, neither here nor at exit.
    """
    before = sys.stdout
    if before is None or isinstance(before, _Outlived):  # closed from the start, or guarded already
        yield
        return
    guard: Any = _Outlived(before)
    sys.stdout = guard
    try:
        yield
    finally:
        guard.flush()
        _drop_if_gone(sys.stderr)
        if sys.stdout is guard:
            sys.stdout = before


class _Outlived:
    """A stream, and after its first failure nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._gone = True
        _send_nowhere(self._stream)
        _drop_if_gone(sys.stderr)  # `2>&1 | head`
        log.warning(
            "standard output is gone (%s): what would be printed from here on is dropped, and the "
            "run goes on",
            error.strerror or error,
        )


def _drop_if_gone(stream: TextIO | None) -> None:
    """What logging has swallowed stays in the buffer, and would fail again at exit."""
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        _send_nowhere(stream)


def _send_nowhere(stream: TextIO | None) -> None:
    """What is left in buffers, and what code below Python writes there, has a place to go."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file behind it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        finally:
            os.close(nowhere)
