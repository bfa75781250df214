"""metrics.csv: the reports as one table."""

from __future__ import annotations

import csv
from pathlib import Path

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.callbacks.logger import Logger, Row, Sink
from torsh_trainer.files import disk_error


class Csv(Logger):
    """Writes ``filename`` in the run directory: a row a report, a column a metric.

    Columns are those of metrics.jsonl; a metric that a split does not have is an empty cell. A
    metric that appears for the first time (an evaluation's, say) adds a column. A resumed run
    appends.
    """

    def __init__(self, *, filename: str = "metrics.csv") -> None:
        super().__init__()
        self.filename = filename

    def open(self, info: RunInfo) -> Sink:
        return Sink() if info.run_dir is None else _CsvSink(info.run_dir / self.filename)


class _CsvSink(Sink):
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
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
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        wider = self._path.with_name(self._path.name + ".tmp")
        with wider.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        wider.replace(self._path)
        self._columns = columns
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def close(self, *, failed: bool) -> None:
        self._file.close()


def _header(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])
