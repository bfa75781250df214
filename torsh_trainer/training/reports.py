"""What callbacks hear of a run: its steps, evaluations and saves, and the numbers of a report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torsh_trainer.callbacks.base import (
    Callback,
    EvaluationReport,
    SaveReport,
    StepReport,
    asks_to_stop,
)
from torsh_trainer.comm.compression.wire import Traffic
from torsh_trainer.training.cadence import Cadence


class StepTimer:
    """Times of a fit, in seconds: since it began, and since the last report.

    What is no training (evaluations, saves) is left out by ``pause``. ``waited_s`` is how long the
    steps have waited for their data; the loop adds to it.
    """

    __slots__ = ("_first_samples", "_paused_s", "_samples", "_since", "_step", "began", "waited_s")

    def __init__(self, *, step: int = 0, samples: int = 0, began: float | None = None) -> None:
        self.began = time.perf_counter() if began is None else began
        self._first_samples = samples
        self._paused_s = 0.0
        self.restart(step=step, samples=samples)

    def restart(self, *, step: int, samples: int) -> None:
        """The next report is of what comes after ``step``, with ``samples`` consumed so far."""
        self._since = time.perf_counter()
        self._step, self._samples, self.waited_s = step, samples, 0.0

    def pause(self, seconds: float) -> None:
        """So many seconds just now were no training."""
        self._since += seconds
        self._paused_s += seconds

    def steps_until(self, step: int) -> int:
        """Steps since the last report, at least 1."""
        return max(1, step - self._step)

    def read(self, *, step: int, samples: int) -> dict[str, float]:
        """Means over the steps since the last report, up to ``step``; and begins the next one."""
        elapsed_s = time.perf_counter() - self._since
        steps = self.steps_until(step)
        times = {
            "samples_per_s": (samples - self._samples) / max(1e-9, elapsed_s),
            "data_wait_s": self.waited_s / steps,
            "step_s": elapsed_s / steps,
        }
        self.restart(step=step, samples=samples)
        return times

    def samples_per_s(self, samples: int) -> float | None:
        """Of the whole fit, with ``samples`` consumed by now; None where it consumed none."""
        consumed = samples - self._first_samples
        wall_s = time.perf_counter() - self.began - self._paused_s
        return consumed / wall_s if consumed else None


class Reports:
    """Tells callbacks of a run, and knows when a report of training is due.

    ``next_step`` is the step of the next report, ``step`` that of the last one. ``wants_all`` says
    that a callback hears of the steps between them too. These are read at every step.
    """

    def __init__(self, callbacks: Sequence[Callback], cadence: Cadence) -> None:
        self._callbacks = callbacks
        self._cadence = cadence
        self._readers = [c for c in callbacks if type(c).on_step is not Callback.on_step]
        self._listeners = [c for c in self._readers if c.every_step]
        self.wants_all = bool(self._listeners)
        self.timer = StepTimer()
        self.step = 0
        self.next_step: float = 1
        self._last_step: int | None = None
        self._first_step = 0
        self._traffic = Traffic()  # up to the last report

    def begin(
        self,
        *,
        step: int,
        samples: int,
        last_step: int | None = None,
        began: float | None = None,
    ) -> None:
        """Training goes on after ``step``, to ``last_step`` where it is known.

        ``began`` is when, by ``time.perf_counter``; None is now.
        """
        self._last_step = last_step
        self._first_step, self._traffic = step, Traffic()
        self.timer = StepTimer(step=step, samples=samples, began=began)
        self._schedule(step)

    def _schedule(self, step: int) -> None:
        self.next_step = self._cadence.next_report(step, last_step=self._last_step)

    def measure(
        self,
        *,
        step: int,
        samples: int,
        loss: float,
        lr: float,
        skipped: int,
        grad_norm: float | None = None,
        traffic: Traffic | None = None,
    ) -> dict[str, float]:
        """The numbers of a report of the steps up to ``step``; the next one begins after it.

        ``skipped`` are steps since the start, ``traffic`` the bytes of gradients so far.
        """
        metrics = {"loss": loss, "lr": lr}
        if grad_norm is not None:
            metrics["grad_norm"] = grad_norm
        steps = self.timer.steps_until(step)
        metrics |= self.timer.read(step=step, samples=samples)
        metrics["skipped"] = float(skipped)
        if traffic is not None:
            metrics |= _per_step(traffic, self._traffic, steps)
            self._traffic = traffic
        self.step = step
        self._schedule(step)
        return metrics

    def average_traffic(self, total: Traffic | None, *, step: int) -> dict[str, float | None]:
        """Bytes of gradients a step of this fit on this rank's wire; None where nobody counts."""
        if total is None:
            return {"sent_bytes_per_step": None, "received_bytes_per_step": None}
        return {**_per_step(total, Traffic(), max(1, step - self._first_step))}

    def tell_step(
        self, step: int, epoch: int, samples: int, metrics: Mapping[str, float] | None
    ) -> bool:
        """Tells of a step that is done, with ``metrics`` where it is reported.

        True when a callback asks to stop. Steps between reports are told to those who want all.
        """
        report = StepReport(step, epoch, samples, metrics)
        stop = False
        for callback in self._listeners if metrics is None else self._readers:
            answer = callback.on_step(report)
            if answer:
                stop = asks_to_stop(callback, "on_step", answer)
        return stop

    def tell_evaluation(self, report: EvaluationReport) -> bool:
        """Tells of an evaluation within training; true when a callback asks to stop."""
        answers = [
            asks_to_stop(callback, "on_evaluate", callback.on_evaluate(report))
            for callback in self._callbacks
        ]
        self.timer.pause(report.wall_s)
        return any(answers)

    def tell_save(self, report: SaveReport) -> None:
        """Tells of a checkpoint."""
        for callback in self._callbacks:
            callback.on_save(report)
        self.timer.pause(report.wall_s)


def add_split(
    metrics: Mapping[str, float], split: str, means: Mapping[str, float]
) -> dict[str, float]:
    """The last ``metrics`` of all splits, with ``means`` of this one: eval's have bare names."""
    if split == "eval":
        return dict(means)
    return {**metrics, **{f"{split}_{name}": value for name, value in means.items()}}


def _per_step(now: Traffic, before: Traffic, steps: int) -> dict[str, float]:
    return {
        "sent_bytes_per_step": (now.sent_bytes - before.sent_bytes) / steps,
        "received_bytes_per_step": (now.received_bytes - before.received_bytes) / steps,
    }
