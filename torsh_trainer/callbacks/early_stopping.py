"""Stopping when a metric no longer improves, or is good enough."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from torsh_trainer.callbacks.base import Callback, EvaluationReport, RunInfo, StepReport
from torsh_trainer.errors import ConfigError, nearest

log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Asks the run to stop when ``monitor`` stops improving or reaches ``threshold``.

    ``monitor`` is a metric of ``split`` (train: of the logged steps). With ``mode`` min, better is
    lower by more than ``min_delta``; with max, higher by more than that. After ``patience`` reports
    in a row without an improvement the run stops; None waits for ever, and only ``threshold`` stops
    it. A value that is not finite is no improvement.

    Raises:
        ConfigError: a knob is out of range; later, that no report has such a metric.
    """

    def __init__(
        self,
        *,
        monitor: str = "loss",
        split: Literal["train", "eval", "test"] = "eval",
        mode: Literal["min", "max"] = "min",
        patience: int | None = 3,
        min_delta: float = 0.0,
        threshold: float | None = None,
    ) -> None:
        _check(split=split, mode=mode, patience=patience, min_delta=min_delta, threshold=threshold)
        self.monitor = monitor
        self.split = split
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.threshold = threshold
        self._sign = 1.0 if mode == "max" else -1.0
        self._best = -math.inf  # of sign * value: higher is better
        self._stale = 0
        self._seen = False
        self._speaks = False  # rank 0, until it has said why it stops

    @property
    def best(self) -> float:
        """The best value so far; infinite before the first."""
        return self._sign * self._best

    def on_start(self, info: RunInfo) -> bool | None:
        self._speaks = info.world.is_rank_zero
        return info.first_step > 0 and self._has_enough(info.first_step)

    def on_step(self, report: StepReport) -> bool | None:
        if report.metrics is None or self.split != "train":
            return None
        return self._judge(report.metrics, report.step)

    def on_evaluate(self, report: EvaluationReport) -> bool | None:
        if report.split != self.split:
            return None
        return self._judge(report.metrics, report.step)

    def on_end(self, result: Mapping[str, Any]) -> None:
        if not self._seen and self._speaks:
            log.warning(
                "early stopping saw no report of split %s; check trainer.eval_every and "
                "callbacks.early_stopping.split",
                self.split,
            )

    def _judge(self, metrics: Mapping[str, float], step: int) -> bool:
        if self.monitor not in metrics:
            raise ConfigError(
                f"callbacks.early_stopping.monitor={self.monitor} is no metric of {self.split}",
                fix=nearest(self.monitor, metrics),
            )
        value = metrics[self.monitor]
        self._seen = True
        if math.isfinite(value) and self._sign * value > self._best + self.min_delta:
            self._best, self._stale = self._sign * value, 0
        else:
            self._stale += 1
        reached = self.threshold is not None and self._sign * (value - self.threshold) >= 0
        if reached:
            return self._stop(step, f"is {value:.6g}, past the threshold of {self.threshold:.6g}")
        return self._has_waited(step)

    def _has_enough(self, step: int) -> bool:
        """Whether the last report before a checkpoint was enough; the run may have died on it."""
        if self.threshold is not None and self._sign * (self.best - self.threshold) >= 0:
            return self._stop(step, f"was {self.best:.6g}, past the threshold")
        return self._has_waited(step)

    def _has_waited(self, step: int) -> bool:
        if self.patience is not None and self._stale >= self.patience:
            return self._stop(step, f"was no better than {self.best:.6g} in {self._stale} reports")
        return False

    def _stop(self, step: int, why: str) -> bool:
        if self._speaks:
            self._speaks = False
            print(f"stopping early at step {step:,}: {self.split} {self.monitor} {why}", flush=True)
        return True

    def state_dict(self) -> dict[str, Any]:
        # Not finite before the first report, which not every format of a checkpoint can hold.
        best = self.best if math.isfinite(self._best) else None
        return {"monitor": self.monitor, "mode": self.mode, "best": best, "stale": self._stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (state["monitor"], state["mode"]) != (self.monitor, self.mode):
            return  # another metric's best says nothing about this one
        self._stale = state["stale"]
        if state["best"] is not None:
            self._best = self._sign * state["best"]


def _check(
    *, split: str, mode: str, patience: int | None, min_delta: float, threshold: float | None
) -> None:
    where = "callbacks.early_stopping"
    for name, value, known in (
        ("mode", mode, ("min", "max")),
        ("split", split, ("train", "eval", "test")),
    ):
        if value not in known:
            raise ConfigError(f"{where}.{name}={value} is unknown", fix=nearest(value, known))
    if patience is not None and patience < 1:
        raise ConfigError(
            f"{where}.patience={patience} is not a positive number",
            fix="give 1 to stop at the first report without an improvement, or null to wait",
        )
    if min_delta < 0:
        raise ConfigError(
            f"{where}.min_delta={min_delta} is negative", fix="give 0 to count any improvement"
        )
    if patience is None and threshold is None:
        raise ConfigError(
            f"{where} has neither patience nor threshold, so it could never stop the run",
            fix=f"give one of them, or set {where}.enabled=false",
        )
