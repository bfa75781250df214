"""A callback and a logger: ``+callbacks.farewell=true``, ``+logger.lines.filename=log.txt``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_trainer.callbacks.base import Callback, RankZeroOnly, RunInfo
from torsh_trainer.callbacks.logger import Logger, Row, Sink


class Farewell(RankZeroOnly, Callback):
    """Says so when a run has ended."""

    def on_end(self, result: Mapping[str, Any]) -> None:
        print(f"farewell after {result['steps']} steps", flush=True)


class Lines(Logger):
    """Writes ``split step loss`` into ``filename`` in the run directory."""

    def __init__(self, *, filename: str = "lines.txt") -> None:
        super().__init__()
        self.filename = filename

    def open(self, info: RunInfo) -> Sink:
        return Sink() if info.run_dir is None else _File(info.run_dir / self.filename)


class _File(Sink):
    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, row: Row) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{row.split} {row.step} {row.metrics['loss']:.6f}\n")
