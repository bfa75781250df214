"""What every logger shares: reports become rows, and rows go to a sink."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torsh_trainer.callbacks.base import EvaluationReport, RankZeroOnly, RunInfo, StepReport
from torsh_trainer.callbacks.throughput import Throughput
from torsh_trainer.errors import ResourceError


@dataclass(frozen=True)
class Row:
    """One report: ``split`` is train, eval or test; ``elapsed_s`` counts from the run's start."""

    split: str
    step: int
    epoch: int
    samples: int
    elapsed_s: float
    metrics: Mapping[str, float]

    def flat(self) -> dict[str, Any]:
        """Everything in one dict, as metrics.jsonl and metrics.csv have it."""
        return {
            "split": self.split,
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            **self.metrics,
            "elapsed_s": round(self.elapsed_s, 3),
        }

    def prefixed_metrics(self) -> dict[str, float]:
        """Metrics under ``split/name``, as experiment trackers have them."""
        return {f"{self.split}/{name}": value for name, value in self.metrics.items()}


IsKept = Callable[[str, int], bool]
"""Of the rows that a file holds already, by split and step."""


class Sink:
    """Where rows go, open from its birth; this one forgets them."""

    def write(self, row: Row) -> None:
        """Keeps a row; what is written survives a crash of the run."""

    def close(self, *, failed: bool) -> None:
        """Lets go of files and connections; ``failed`` says how the run ended."""


class Logger(RankZeroOnly, abc.ABC):
    """A callback that writes every report of rank 0 to one sink.

    Subclasses hold knobs and say how to ``open`` their sink. A checkpoint holds which reports were
    made before it; a run that goes on from there makes those after it again.
    """

    every_step = False

    def __init__(self) -> None:
        self._sink = Sink()
        self._throughput = Throughput()
        self._started_s = 0.0
        self._reported: dict[str, int] = {}  # split -> its last step

    @abc.abstractmethod
    def open(self, info: RunInfo) -> Sink:
        """The sink of the run that ``info`` describes.

        Raises:
            ResourceError: a library is missing, or the disk or a service refuses.
        """

    def on_start(self, info: RunInfo) -> None:
        self._throughput = Throughput.of(info)
        self._started_s = time.monotonic()
        self._sink = self.open(info)

    def is_kept(self, info: RunInfo) -> IsKept | None:
        """Which rows of an earlier part of this run stay; None when the run begins anew."""
        if not info.trains:
            return lambda split, step: True
        if info.first_step == 0:
            return None
        reported = dict(self._reported)
        if not reported:  # a logger that the run which was saved did not have
            return lambda split, step: step <= info.first_step
        return lambda split, step: step <= reported.get(split, -1)

    def state_dict(self) -> dict[str, Any]:
        return {"reported": dict(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reported = dict(state["reported"])

    def on_step(self, report: StepReport) -> bool | None:
        if report.metrics is not None:
            metrics = self._throughput.complete(report.metrics)
            self._write("train", report, metrics)
        return None

    def on_evaluate(self, report: EvaluationReport) -> bool | None:
        self._write(report.split, report, {**report.metrics, "wall_s": report.wall_s})
        return None

    def on_error(self, error: BaseException) -> None:
        self._close(failed=True)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self._close(failed=False)

    def _write(
        self, split: str, report: StepReport | EvaluationReport, metrics: Mapping[str, float]
    ) -> None:
        self._reported[split] = report.step
        elapsed_s = time.monotonic() - self._started_s
        self._sink.write(Row(split, report.step, report.epoch, report.samples, elapsed_s, metrics))

    def _close(self, *, failed: bool) -> None:
        sink, self._sink = self._sink, Sink()
        sink.close(failed=failed)


def require(module: str, *, knob: str, extra: str = "loggers") -> None:
    """Checks, without importing it, that an optional library is installed.

    Raises:
        ResourceError: it is not; the fix names the extra that brings it.
    """
    if find_spec(module) is None:
        raise ResourceError(
            f"{knob} needs {module}, which is not installed",
            fix=f'pip install "torsh-trainer[{extra}]", or switch it off',
            library=module,
            extra=extra,
        )
