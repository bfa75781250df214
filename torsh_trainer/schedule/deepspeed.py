"""The warm-up of DeepSpeed's schedulers as a pure function of the update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torsh_trainer.schedule.base import Schedule
from torsh_trainer.schedule.shapes import check, check_share, no_total


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
