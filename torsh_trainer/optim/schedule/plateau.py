"""Reduce on plateau: the learning rate follows a metric of the evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch.optim import Optimizer

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.optim.schedule.base import RunningSchedule, StatefulSchedule
from torsh_trainer.optim.schedule.shapes import Constant, check


@dataclass(frozen=True, kw_only=True)
class ReduceOnPlateau(StatefulSchedule):
    """Multiplies learning rates by ``gamma`` when a metric has stopped improving.

    The rule is that of torch's ReduceLROnPlateau (``gamma`` is its ``factor``): an evaluation is
    bad unless ``metric`` beats the best by ``threshold`` (a share of the best when ``rel``);
    after more than ``patience`` bad ones the rate falls, not below ``min_lr`` and not by less
    than ``eps``, and the next ``cooldown`` evaluations count nothing. ``mode`` says which way is
    better. ``warmup_*`` are a linear warm-up, as in the other schedules, on top.

    Raises:
        ConfigError: a knob is out of its range.
    """

    name: ClassVar[str] = "reduce_on_plateau"
    takes_new_knobs: ClassVar[bool] = True
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    gamma: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8
    warmup_steps: int = 0
    warmup_ratio: float | None = None
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        check("mode", self.mode, self.mode in ("min", "max"), "min or max")
        check("gamma", self.gamma, 0.0 < self.gamma < 1.0, "between 0 and 1")
        check(
            "threshold_mode",
            self.threshold_mode,
            self.threshold_mode in ("rel", "abs"),
            "rel or abs",
        )
        for option in ("patience", "cooldown", "min_lr", "eps"):
            check(option, getattr(self, option), getattr(self, option) >= 0, "0 or more")
        _ = self.warmup

    @property
    def warmup(self) -> Constant:
        """The warm-up as a schedule of its own."""
        return Constant(
            warmup_steps=self.warmup_steps,
            warmup_ratio=self.warmup_ratio,
            warmup_start=self.warmup_start,
        )

    def start(
        self, optimizers: Mapping[str, Optimizer], *, total: int | None = None
    ) -> RunningSchedule:
        return Plateau(self, optimizers, total=total)

    def improves(self, value: float, best: float) -> bool:
        """Whether ``value`` beats ``best`` by the threshold; NaN beats nothing."""
        sign = 1.0 if self.mode == "max" else -1.0
        if self.threshold_mode == "rel":
            bar = best * (1.0 + sign * self.threshold)
        else:
            bar = best + sign * self.threshold
        return value > bar if self.mode == "max" else value < bar


class Plateau(RunningSchedule):
    """``ReduceOnPlateau`` at work. ``learning_rates`` are those after warm-up, by optimizer."""

    def __init__(
        self,
        knobs: ReduceOnPlateau,
        optimizers: Mapping[str, Optimizer],
        *,
        total: int | None = None,
    ) -> None:
        self.knobs = knobs
        self.learning_rates = {
            name: [float(group["lr"]) for group in optimizer.param_groups]
            for name, optimizer in optimizers.items()
        }
        self._optimizers = optimizers
        self._warmup = knobs.warmup
        self._warming = not self._warmup.constant
        self._total = total
        self._updates = 0
        self._best: float | None = None
        self._bad = 0
        self._cooling = 0
        self._apply()

    def on_update(self) -> None:
        self._updates += 1
        if self._warming:
            self._apply()

    def on_epoch(self) -> None:
        """Epochs change nothing here."""

    def on_evaluate(self, metrics: Mapping[str, float]) -> None:
        knobs = self.knobs
        if knobs.metric not in metrics:
            raise ConfigError(
                f"schedule=reduce_on_plateau follows the metric {knobs.metric!r}, "
                "which the evaluation does not give",
                fix=nearest(knobs.metric, metrics),
            )
        value = float(metrics[knobs.metric])
        worst = float("-inf") if knobs.mode == "max" else float("inf")
        if knobs.improves(value, worst if self._best is None else self._best):
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooling:
            self._cooling -= 1
            self._bad = 0
        if self._bad > knobs.patience:
            self._reduce()
            self._cooling, self._bad = knobs.cooldown, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "updates": self._updates,
            "best": self._best,
            "bad": self._bad,
            "cooling": self._cooling,
            "learning_rates": {name: list(lrs) for name, lrs in self.learning_rates.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = int(state["updates"])
        self._best = None if state["best"] is None else float(state["best"])
        self._bad, self._cooling = int(state["bad"]), int(state["cooling"])
        self.learning_rates = {name: list(lrs) for name, lrs in state["learning_rates"].items()}
        self._warming = not self._warmup.constant
        self._apply()

    def _reduce(self) -> None:
        for rates in self.learning_rates.values():
            for i, old in enumerate(rates):
                new = max(old * self.knobs.gamma, self.knobs.min_lr)
                if old - new > self.knobs.eps:
                    rates[i] = new
        self._apply()

    def _apply(self) -> None:
        factor = self._warmup.factor(self._updates, self._total)
        if factor == 1.0:  # the warm-up is over: nothing changes between evaluations
            self._warming = False
        for name, optimizer in self._optimizers.items():
            for group, rate in zip(optimizer.param_groups, self.learning_rates[name], strict=True):
                group["lr"] = rate * factor
