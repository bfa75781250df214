"""metrics.csv: the reports as one table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.callbacks.logger import IsKept, Logger, Row, Sink
from torsh_trainer.callbacks.places import in_run_directory
from torsh_trainer.utils.files import disk_error, set_aside, write_file


class Csv(Logger):
    """Writes ``filename`` in the run directory: a row a report, a column a metric.

    Columns are those of metrics.jsonl; a metric that a split does not have is an empty cell. A
    metric that appears for the first time (an evaluation's, say) adds a column. What a resumed
    run does with the file is what Jsonl does.

    Raises:
        ConfigError: ``filename`` is no name in the run directory.
    """

    def __init__(self, *, filename: str = "metrics.csv") -> None:
        super().__init__()
        self.filename = in_run_directory(filename, knob="logger.csv.filename")

    def open(self, info: RunInfo) -> Sink:
        if info.run_dir is None:
            return Sink()
        return _CsvSink(info.run_dir / self.filename, self.is_kept(info))


class _CsvSink(Sink):
    def __init__(self, path: Path, is_kept: IsKept | None) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_kept is None:
                set_aside(path)
            elif path.exists():
                _drop(path, is_kept)
            self._columns = _header(path)
            self._file = path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise disk_error(error, "write", path) from error

    def write(self, row: Row) -> None:
        content = row.flat()
        try:
            new = [name for name in content if name not in self._columns]
            if new:
                self._widen([*self._columns, *new])
            csv.DictWriter(self._file, self._columns, restval="").writerow(content)
            self._file.flush()
        except OSError as error:
            raise disk_error(error, "write", self._path) from error

    def _widen(self, columns: list[str]) -> None:
        """Rewrites the file under a longer header; whole or not at all."""
        self._file.close()
        _write(self._path, columns, _rows(self._path))
        self._columns = columns
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def close(self, *, failed: bool) -> None:
        self._file.close()


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _write(path: Path, columns: Sequence[str], rows: list[dict[str, str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())


def _drop(path: Path, is_kept: IsKept) -> None:
    """Takes out rows that are reported again, and what a killed run had half written."""
    rows = _rows(path)
    kept = [row for row in rows if _stays(row, is_kept)]
    if len(kept) < len(rows):
        _write(path, _header(path), kept)


def _stays(row: dict[str, str], is_kept: IsKept) -> bool:
    try:
        whole = None not in row.values()  # a line that broke off has fewer cells
        return whole and is_kept(row["split"], int(row["step"]))
    except (KeyError, ValueError):
        return False


def _header(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])
