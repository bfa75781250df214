"""metrics.jsonl: one JSON object a report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.callbacks.logger import IsKept, Logger, Row, Sink
from torsh_trainer.callbacks.places import in_run_directory
from torsh_trainer.utils.files import disk_error, set_aside, strict_json, write_file

_TAIL_BYTES = 65536


class Jsonl(Logger):
    """Writes ``filename`` in the run directory: one strict JSON object a line, for each report.

    Keys: ``split``, ``step``, ``epoch``, ``samples``, the metrics of the report, ``elapsed_s``
    (seconds of training, earlier parts of a resumed run included). A number that is not finite is
    ``null``. Every line is handed to the system at once, so that a crash loses none. A resumed run
    appends, after it has dropped what was reported after the checkpoint that it goes on from. A run
    that begins anew keeps the file of an earlier one as metrics.1.jsonl.

    Raises:
        ConfigError: ``filename`` is no name in the run directory.
    """

    def __init__(self, *, filename: str = "metrics.jsonl") -> None:
        super().__init__()
        self.filename = in_run_directory(filename, knob="logger.jsonl.filename")

    def open(self, info: RunInfo) -> Sink:
        if info.run_dir is None:
            return Sink()
        return _JsonlSink(info.run_dir / self.filename, self.is_kept(info))


class _JsonlSink(Sink):
    def __init__(self, path: Path, is_kept: IsKept | None) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_kept is None:
                set_aside(path)
            elif path.exists():
                _drop(path, is_kept)
            self._earlier_s = _read_elapsed_s(path)
            self._file: TextIO = path.open("a", encoding="utf-8")
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


def _drop(path: Path, is_kept: IsKept) -> None:
    """Takes out rows that are reported again, and what a killed run had half written."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _stays(line, is_kept)]
    if len(kept) < len(lines):
        write_file(path, b"".join(kept))


def _stays(line: bytes, is_kept: IsKept) -> bool:
    try:
        row = json.loads(line)
        return line.endswith(b"\n") and is_kept(row["split"], row["step"])
    except (ValueError, KeyError, TypeError):
        return False


def _read_elapsed_s(path: Path) -> float:
    for line in reversed(_tail(path).splitlines()):
        try:
            return float(json.loads(line)["elapsed_s"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0
