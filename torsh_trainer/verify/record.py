"""What a witness has left in a run directory, read again."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

FACTS, ROWS, PARAMETERS = "verify.json", "verify.jsonl", "parameters"

Arrays = dict[str, Any]
"""Parameter name -> numpy array."""


def parameters_file(run_dir: Path, step: int) -> Path:
    """Where the parameters after ``step`` lie; 0 is before the first."""
    folder = run_dir / PARAMETERS
    folder.mkdir(exist_ok=True)
    return folder / f"step-{step:06d}.npz"


@dataclass(frozen=True)
class Record:
    """One run as its witness saw it."""

    run_dir: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        """``optimizers`` (names of classes), ``gradient_scale``, ``world_size``,
        ``micro_batch_size``, ``accumulate``, and ``parameters`` (how many numbers)."""
        content: dict[str, Any] = json.loads((self.run_dir / FACTS).read_text())
        return content

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Of every step, from 0 on: ``step``, ``loss``, ``grad_norm``, ``lr``, ...; 0 has none."""
        text = (self.run_dir / ROWS).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def parameters(self, step: int) -> Arrays:
        """The parameters after ``step``."""
        import numpy  # what is answered before a run has ended does without it

        with numpy.load(parameters_file(self.run_dir, step), allow_pickle=False) as stored:
            return {str(name): stored[str(i)] for i, name in enumerate(stored["names"])}

    def forget_parameters(self) -> None:
        """Takes the parameters off the disk: they are large, and compared."""
        folder = self.run_dir / PARAMETERS
        for path in folder.glob("step-*.npz"):
            path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()
