"""DeepSpeed's schedulers as functions of the update alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch.optim import Optimizer

from torsh_trainer.optim.schedule.base import RunningSchedule, Schedule, StatefulSchedule
from torsh_trainer.optim.schedule.shapes import check, check_share, no_total

__all__ = ["DeepSpeedOneCycle", "DeepSpeedRangeTest", "DeepSpeedWarmup"]


@dataclass(frozen=True, kw_only=True)
class DeepSpeedWarmup(Schedule):
    """WarmupLR (``decay`` none), WarmupDecayLR (linear) and WarmupCosineLR (cosine) of DeepSpeed.

    DeepSpeed steps its scheduler after the update and begins before its first step, so that the
    second update has the rate of the first: with ``j = u - 1`` and ``W = max(2, warmup_steps)`` the
    rise is ``ln(j + 1) / ln W`` (log) or ``j / W`` (linear), from ``start`` to 1. After it, the
    factor is 1, falls linearly to ``start`` at ``total_steps``, or by half a cosine to ``final``.
    A cosine's first update has the factor 0. Source: deepspeed/runtime/lr_schedules.py, 0.19.8.

    Raises:
        ConfigError: a knob is out of its range.
    """

    name: ClassVar[str] = "deepspeed_warmup"
    warmup_steps: int = 1000
    warmup: Literal["log", "linear"] = "log"
    start: float = 0.0
    decay: Literal["none", "linear", "cosine"] = "none"
    final: float = 0.0001
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check("warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "0 or more updates")
        check("warmup", self.warmup, self.warmup in ("log", "linear"), "log or linear")
        check("start", self.start, self.start >= 0.0, "0 or more: a factor on the learning rate")
        decays = ("none", "linear", "cosine")
        check("decay", self.decay, self.decay in decays, "none, linear or cosine")
        check_share("final", self.final)
        if self.total_steps is not None:
            check("total_steps", self.total_steps, self.total_steps >= 1, "1 or more updates")

    def factor(self, update: int, total: int | None) -> float:
        total = self.total_steps or total
        if self.decay != "none" and total is None:
            raise no_total(self.name)
        if update == 0:
            return 0.0 if self.decay == "cosine" else self.start
        position, warmup = update - 1, max(2, self.warmup_steps)
        if position < warmup:
            rise = math.log(position + 1) / math.log(warmup)
            if self.warmup == "linear":
                rise = position / warmup
            return self.start + (1.0 - self.start) * rise
        if self.decay == "none" or total is None:
            return 1.0
        return self._fall(position, warmup, total)

    def _fall(self, position: int, warmup: int, total: int) -> float:
        length = max(1, total - warmup)
        if self.decay == "linear":
            left = max(0.0, (total - position) / length)
            return self.start + (1.0 - self.start) * left
        progress = min(1.0, (position - warmup + 1) / length)
        return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True, kw_only=True)
class DeepSpeedRangeTest(Schedule):
    """LRRangeTest of DeepSpeed: ``1 + step_rate * u / step_size``, for ever.

    ``staircase`` takes the whole part of ``u / step_size``. The base rate is the least one
    (Smith 2018, arXiv:1803.09820). Source: deepspeed/runtime/lr_schedules.py, 0.19.8.

    Raises:
        ConfigError: a knob is out of its range.
    """

    name: ClassVar[str] = "deepspeed_range_test"
    step_size: int = 2000
    step_rate: float = 1.0
    staircase: bool = False

    def __post_init__(self) -> None:
        check("step_size", self.step_size, self.step_size >= 1, "1 or more updates")

    def factor(self, update: int, total: int | None) -> float:
        position = update / self.step_size
        return 1.0 + self.step_rate * (math.floor(position) if self.staircase else position)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOneCycle(StatefulSchedule):
    """OneCycle of DeepSpeed: rate up and down again, momentum the other way, then a decay.

    The base rate is the highest. With ``S = first_steps + second_steps`` the height ``h`` rises
    from 0 to 1 over the first and falls over the second; ``first_stairs`` and ``second_stairs``
    (0: none) cut it into so many steps. Until update ``S`` the factor is
    ``low + (1 - low) * h``; after it ``low / (1 + decay_rate * (u - S) / decay_steps)``, or
    ``low`` where ``decay_steps`` is 0. ``second_steps`` and ``second_stairs`` are those of the
    first half where they are null.

    ``momentum`` sets the betas of optimizers that have them to ``(m, 0.99)``, with ``m`` falling
    from ``high_momentum`` to ``low_momentum`` by ``h``, and after the cycle
    ``high_momentum * (1 + momentum_decay_rate * (u - S) / decay_steps)``; the first update has
    ``low_momentum``. Source: deepspeed/runtime/lr_schedules.py, 0.19.8 (Smith 2018,
    arXiv:1803.09820).

    Raises:
        ConfigError: a knob is out of its range.
    """

    name: ClassVar[str] = "deepspeed_one_cycle"
    takes_new_knobs: ClassVar[bool] = True
    low: float = 0.1
    first_steps: float = 2000
    second_steps: float | None = None
    first_stairs: int = 0
    second_stairs: int | None = None
    decay_steps: float = 0
    decay_rate: float = 0.0
    momentum: bool = True
    low_momentum: float = 0.8
    high_momentum: float = 0.9
    momentum_decay_rate: float = 0.0

    def __post_init__(self) -> None:
        check("low", self.low, self.low >= 0.0, "0 or more: a factor on the learning rate")
        check("first_steps", self.first_steps, self.first_steps > 0, "more than 0 updates")
        for option in ("second_steps", "first_stairs", "second_stairs", "decay_steps"):
            value = getattr(self, option)
            if value is not None:
                check(option, value, value >= 0, "0 or more")

    def start(
        self, optimizers: Mapping[str, Optimizer], *, total: int | None = None
    ) -> RunningSchedule:
        return _Cycling(self, optimizers)

    def factor(self, update: int) -> float:
        """The factor on the base rate for the update numbered ``update`` (0 is the first)."""
        after = self._after(update)
        if not after:
            return self.low + (1.0 - self.low) * self._height(update)
        return self.low / (1.0 + self.decay_rate * self._intervals(after))

    def beta(self, update: int) -> float:
        """The first beta for the update numbered ``update``."""
        if update == 0:
            return self.low_momentum
        after = self._after(update)
        if not after:
            return self.high_momentum - (
                (self.high_momentum - self.low_momentum) * self._height(update)
            )
        return self.high_momentum * (1.0 + self.momentum_decay_rate * self._intervals(after))

    def _after(self, update: int) -> float:
        """Updates since the end of the cycle; 0 within it."""
        return update - self._length if update - 1 >= self._length else 0.0

    @property
    def _second(self) -> float:
        return self.first_steps if self.second_steps is None else self.second_steps

    @property
    def _length(self) -> float:
        return self.first_steps + self._second

    def _intervals(self, after: float) -> float:
        return after / self.decay_steps if self.decay_steps else 0.0

    def _height(self, update: int) -> float:
        position = update % self._length
        stairs = self.first_stairs
        height, steps = position, self.first_steps
        if position > self.first_steps:
            stairs = self.first_stairs if self.second_stairs is None else self.second_stairs
            height, steps = self._length - position, self._second
        return math.floor(height * stairs / steps) / stairs if stairs else height / steps


class _Cycling(RunningSchedule):
    def __init__(self, knobs: DeepSpeedOneCycle, optimizers: Mapping[str, Optimizer]) -> None:
        self._knobs = knobs
        self._groups = [
            (group, float(group["lr"]), knobs.momentum and "betas" in group)
            for optimizer in optimizers.values()
            for group in optimizer.param_groups
        ]
        self._updates = 0
        self._set()

    def _set(self) -> None:
        factor, beta = self._knobs.factor(self._updates), self._knobs.beta(self._updates)
        for group, base, cycles in self._groups:
            group["lr"] = base * factor
            if cycles:
                group["betas"] = (beta, _SECOND_BETA)

    def on_update(self) -> None:
        self._updates += 1
        self._set()

    def on_epoch(self) -> None:
        """Nothing: it follows updates."""

    def on_evaluate(self, metrics: Mapping[str, float]) -> None:
        """Nothing: it follows updates."""

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = int(state["updates"])
        self._set()


_SECOND_BETA = 0.99
"""What DeepSpeed's OneCycle sets beside the momentum, whatever was given."""
