"""Schedules that are pure functions of the update: warm-up, then a shape.

Throughout, ``u`` is the number of the update (0 is the first), ``W`` the updates of warm-up, ``T``
the total, and ``p = (u - W) / (T - W)``, held within 0 and 1, the progress after warm-up.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar, Literal

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.schedule.base import Schedule


@dataclass(frozen=True, kw_only=True)
class WarmUp(Schedule):
    """What every shape shares: a linear warm-up, ``warmup_start + (1 - warmup_start) * u / W``.

    ``W`` is ``warmup_steps`` updates, or ``warmup_ratio`` of the total, rounded. A warm-up from 0
    (Goyal et al. 2017, arXiv:1706.02677) makes the first update change nothing. It is
    torch's LinearLR with ``start_factor=warmup_start``.

    Raises:
        ConfigError: a knob is out of its range, or both lengths are given.
    """

    warmup_steps: int = 0
    warmup_ratio: float | None = None
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ConfigError(
                f"schedule.warmup_steps={self.warmup_steps} and "
                f"schedule.warmup_ratio={self.warmup_ratio} both set the warm-up",
                fix="give one of them",
            )
        check("warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "0 or more updates")
        if self.warmup_ratio is not None:
            check_share("warmup_ratio", self.warmup_ratio)
        check_share("warmup_start", self.warmup_start)

    def factor(self, update: int, total: int | None) -> float:
        warmup = self.warmup_steps
        if self.warmup_ratio is not None:
            if total is None:
                raise no_total(self.name)
            warmup = round(self.warmup_ratio * total)
        return self.rise(update, warmup) if update < warmup else self.after(update, warmup)

    def rise(self, update: int, warmup: int) -> float:
        """The factor within a warm-up of so many updates."""
        return self.warmup_start + (1.0 - self.warmup_start) * update / warmup

    def after(self, update: int, warmup: int) -> float:
        """The factor from update ``warmup`` on."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Decay(WarmUp):
    """A shape that ends: at ``total_steps`` updates (None: those of the run) it is ``final``."""

    final: float = 0.0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check("final", self.final, self.final >= 0.0, "0 or more: a factor on the learning rate")
        if self.total_steps is not None:
            check("total_steps", self.total_steps, self.total_steps >= 1, "1 or more updates")

    # Called before every update: it costs no more calls than it must.
    def factor(self, update: int, total: int | None) -> float:
        total = self.total_steps or total
        if total is None:
            raise no_total(self.name)
        ratio = self.warmup_ratio
        warmup = self.warmup_steps if ratio is None else round(ratio * total)
        if update < warmup:
            return self.rise(update, warmup)
        return self.fall(update, warmup, total)

    def fall(self, update: int, warmup: int, total: int) -> float:
        """The factor from update ``warmup`` on."""
        if update >= total:
            return self.final
        return self.final + (1.0 - self.final) * self.shape((update - warmup) / (total - warmup))

    def shape(self, progress: float) -> float:
        """From 1 at progress 0 to 0 at progress 1."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Constant(WarmUp):
    """``1`` after warm-up."""

    name: ClassVar[str] = "constant"

    @property
    def constant(self) -> bool:
        return not self.warmup_steps and not self.warmup_ratio

    def after(self, update: int, warmup: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Linear(Decay):
    """``final + (1 - final) * (1 - p)``: torch's LinearLR with ``end_factor=final``."""

    name: ClassVar[str] = "linear"

    def shape(self, progress: float) -> float:
        return 1.0 - progress


@dataclass(frozen=True, kw_only=True)
class Cosine(Decay):
    """``final + (1 - final) * (1 + cos(pi p)) / 2``.

    Loshchilov & Hutter 2017 (arXiv:1608.03983), without restarts: torch's CosineAnnealingLR with
    ``T_max = T - W`` and ``eta_min = final * lr``.
    """

    name: ClassVar[str] = "cosine"

    def shape(self, progress: float) -> float:
        return 0.5 + 0.5 * math.cos(math.pi * progress)


@dataclass(frozen=True, kw_only=True)
class Polynomial(Decay):
    """``final + (1 - final) * (1 - p) ** power``: torch's PolynomialLR when ``final`` is 0."""

    name: ClassVar[str] = "polynomial"
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check("power", self.power, self.power > 0.0, "positive")

    def shape(self, progress: float) -> float:
        return (1.0 - progress) ** self.power


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(WarmUp):
    """``sqrt(timescale / (u - W + timescale))`` after warm-up; it never ends.

    Vaswani et al. 2017 (arXiv:1706.03762, section 5.3). ``timescale`` None is ``W``, or 10000
    without a warm-up: with it the factor is ``sqrt(W / u)``, and the peak is the base rate.
    """

    name: ClassVar[str] = "inverse_sqrt"
    timescale: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timescale is not None:
            check("timescale", self.timescale, self.timescale >= 1, "1 or more updates")

    def after(self, update: int, warmup: int) -> float:
        timescale = self.timescale or warmup or 10_000
        return math.sqrt(timescale / (update - warmup + timescale))


@dataclass(frozen=True, kw_only=True)
class Step(WarmUp):
    """``gamma ** k``: k counts the ``milestones`` (updates) passed, or is ``u // step_size``.

    torch's MultiStepLR and StepLR; both count updates from the beginning, warm-up included.
    """

    name: ClassVar[str] = "step"
    step_size: int | None = None
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "milestones", tuple(self.milestones))
        if (self.step_size is None) == (not self.milestones):
            raise ConfigError(
                "schedule=step needs one of schedule.step_size and schedule.milestones",
                fix="for example schedule.step_size=1000, or schedule.milestones=[3000,6000]",
            )
        if self.step_size is not None:
            check("step_size", self.step_size, self.step_size >= 1, "1 or more updates")
        ascending = list(self.milestones) == sorted(self.milestones)
        check("milestones", list(self.milestones), ascending, "in ascending order")
        check("gamma", self.gamma, self.gamma > 0.0, "positive")

    def after(self, update: int, warmup: int) -> float:
        if self.step_size is not None:
            return self.gamma ** (update // self.step_size)
        return self.gamma ** bisect_right(self.milestones, update)


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Decay):
    """``1`` after warm-up until the last ``D`` updates, then down to ``final`` by ``decay``.

    With ``q = (u - (T - D)) / D``: linear ``1 - q``, cosine ``(1 + cos(pi q)) / 2``, sqrt
    ``1 - sqrt(q)``, each put between 1 and ``final``. ``D`` is ``decay_steps`` updates, or
    ``decay_ratio`` of the total, rounded, and never cuts into the warm-up. Hu et al. 2024
    (arXiv:2404.06395); the sqrt decay is from Haegele et al. 2024 (arXiv:2405.18392).
    """

    name: ClassVar[str] = "warmup_stable_decay"
    decay_steps: int | None = None
    decay_ratio: float = 0.2
    decay: Literal["linear", "cosine", "sqrt"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("decay_ratio", self.decay_ratio)
        if self.decay_steps is not None:
            check("decay_steps", self.decay_steps, self.decay_steps >= 0, "0 or more updates")
        check("decay", self.decay, self.decay in _FALLS, f"one of {', '.join(_FALLS)}")

    def fall(self, update: int, warmup: int, total: int) -> float:
        steps = self.decay_steps
        if steps is None:
            steps = round(self.decay_ratio * total)
        steps = min(steps, total - warmup)
        done = update - (total - steps)
        if done < 0:
            return 1.0
        if done >= steps:
            return self.final
        return self.final + (1.0 - self.final) * _FALLS[self.decay](done / steps)


@dataclass(frozen=True, kw_only=True)
class OneCycle(Schedule):
    """Up from ``1 / div_factor`` to 1, and down to ``1 / (div_factor * final_div_factor)``.

    torch's OneCycleLR (Smith & Topin 2017, arXiv:1708.07120) with ``max_lr`` the optimizer's own
    ``lr`` and ``cycle_momentum=False``. The rise ends after ``warmup_steps`` updates or
    ``warmup_ratio`` (torch's ``pct_start``) of the total; ``three_phase`` comes down to the start
    as fast as it rose, and then goes on to the end. ``anneal`` is cos or linear.
    """

    name: ClassVar[str] = "one_cycle"
    warmup_steps: int | None = None
    warmup_ratio: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    anneal: Literal["cos", "linear"] = "cos"
    three_phase: bool = False
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check_share("warmup_ratio", self.warmup_ratio)
        for option in ("warmup_steps", "total_steps"):
            value = getattr(self, option)
            if value is not None:
                check(option, value, value >= 1, "1 or more updates")
        for option in ("div_factor", "final_div_factor"):
            check(option, getattr(self, option), getattr(self, option) > 0, "positive")
        check("anneal", self.anneal, self.anneal in ("cos", "linear"), "cos or linear")

    def factor(self, update: int, total: int | None) -> float:
        length = self.total_steps or total
        if length is None:
            raise no_total(self.name)
        rise = self.warmup_ratio * length if self.warmup_steps is None else self.warmup_steps
        first, last = 1.0 / self.div_factor, 1.0 / (self.div_factor * self.final_div_factor)
        top, end = rise - 1.0, length - 1.0
        if update <= top:
            return self._between(first, 1.0, update, 0.0, top)
        if self.three_phase:
            foot = 2.0 * rise - 2.0
            if update <= foot:
                return self._between(1.0, first, update, top, foot)
            return self._between(first, last, update, foot, end)
        return self._between(1.0, last, update, top, end)

    def _between(self, start: float, stop: float, update: int, begin: float, end: float) -> float:
        share = min(1.0, (update - begin) / (end - begin)) if end > begin else 1.0
        if self.anneal == "cos":
            share = 0.5 - 0.5 * math.cos(math.pi * share)
        return start + (stop - start) * share


_FALLS = {
    "linear": lambda q: 1.0 - q,
    "cosine": lambda q: 0.5 + 0.5 * math.cos(math.pi * q),
    "sqrt": lambda q: 1.0 - math.sqrt(q),
}


def no_total(schedule: str) -> ConfigError:
    """The error of a schedule that must know how long the run is, and cannot."""
    return ConfigError(
        f"schedule={schedule} needs to know how many updates the run has, "
        "and neither trainer.max_steps nor trainer.max_epochs says so",
        fix="set trainer.max_steps, or take schedule=constant, inverse_sqrt or step "
        "with schedule.warmup_steps",
        schedule=schedule,
    )


def check(option: str, value: object, holds: bool, what: str) -> None:
    """Refuses a knob of the schedule that is out of its range.

    Raises:
        ConfigError: ``holds`` is false.
    """
    if not holds:
        raise ConfigError(f"schedule.{option}={value} is not {what}", fix="correct its value")


def check_share(option: str, value: float) -> None:
    """Refuses a share of the run that is not between 0 and 1.

    Raises:
        ConfigError: it is not.
    """
    check(option, value, 0.0 <= value <= 1.0, "between 0 and 1")
