"""metrics.jsonl: one JSON object a report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.callbacks.logger import Logger, Row, Sink
from torsh_trainer.files import disk_error, strict_json

_TAIL_BYTES = 65536


class Jsonl(Logger):
    """Writes ``filename`` in the run directory: one strict JSON object a line, for each report.

    Keys: ``split``, ``step``, ``epoch``, ``samples``, the metrics of the report, ``elapsed_s``
    (seconds of training, earlier parts of a resumed run included). A number that is not finite is
    ``null``. Every line is handed to the system at once, so that a crash loses none. A resumed run
    appends.
    """

    def __init__(self, *, filename: str = "metrics.jsonl") -> None:
        super().__init__()
        self.filename = filename

    def open(self, info: RunInfo) -> Sink:
        return Sink() if info.run_dir is None else _JsonlSink(info.run_dir / self.filename)


class _JsonlSink(Sink):
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._earlier_s = _elapsed_so_far(path)
            self._file: TextIO = path.open("a", encoding="utf-8")
            if _ends_within_a_line(path):
                self._file.write("\n")
        except OSError as error:
            raise disk_error(error, "write", path) from error

    def write(self, row: Row) -> None:
        content = row.flat()
        content["elapsed_s"] = round(self._earlier_s + row.elapsed_s, 3)
        try:
            self._file.write(strict_json(content, indent=None) + "\n")
            self._file.flush()
        except OSError as error:
            raise disk_error(error, "write", self._path) from error

    def close(self, *, failed: bool) -> None:
        self._file.close()


def _tail(path: Path) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES), os.SEEK_SET)
        return file.read()


def _ends_within_a_line(path: Path) -> bool:
    """A run that was killed in the middle of a write must not spoil its successor's first line."""
    tail = _tail(path)
    return bool(tail) and not tail.endswith(b"\n")


def _elapsed_so_far(path: Path) -> float:
    for line in reversed(_tail(path).splitlines()):
        try:
            return float(json.loads(line)["elapsed_s"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0
