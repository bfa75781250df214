"""Where numbers stand along an axis, and the ticks that people read them by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end] in pixels, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def linear(values: Sequence[float], start: float, end: float, *, zero: bool = False) -> Scale:
    """A scale that holds ``values`` with a little air around them; ``zero`` starts it at 0."""
    low, high = min(values), max(values)
    if zero:
        low = min(0.0, low)
        high = high or 1.0
        return Scale(low, high + 0.06 * (high - low), start, end)
    air = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return Scale(low - air, high + air, start, end)


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale by logarithm that holds ``values``, all positive."""
    low, high = min(values), max(values)
    air = (high / low) ** 0.05 if high > low else 10.0**0.5
    return Scale(low / air, high * air, start, end, log=True)


def along(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale for an x axis, without air; from 0 unless the values begin far from it."""
    low, high = min(values), max(values)
    low = 0.0 if low < 0.3 * high else low
    return Scale(low, high if high > low else low + 1.0, start, end)


def ticks(scale: Scale, *, count: int) -> list[float]:
    """About ``count`` round numbers within a scale."""
    if scale.log:
        return _log_ticks(scale.low, scale.high, count)
    raw = (scale.high - scale.low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    return _multiples(scale, next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999))


def time_ticks(scale: Scale, *, count: int) -> list[float]:
    """Ticks in seconds at whole seconds, minutes, hours or days."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
    raw = (scale.high - scale.low) / count
    if raw < 1:
        return ticks(scale, count=count)
    step = next((s for s in steps if s >= raw), None)
    return _multiples(scale, float(step or 86400 * math.ceil(raw / 86400)))


def labels(ticks: Sequence[float]) -> list[str]:
    """What stands at ticks: each as ``short``, with digits enough to tell one from another."""
    made = [short(tick) for tick in ticks]
    for digits in range(4, 10):
        if len({*made}) == len(ticks):
            break
        made = [short(tick, digits) for tick in ticks]
    return made


def short(value: float, digits: int = 3) -> str:
    """A tick's label: ``0.05``, ``1,200``, ``45k``, ``2.5M``, ``3e-05``."""
    if value == 0:
        return "0"
    size = abs(value)
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= bound:
            divisor = 1e3 if unit == "k" else bound
            return f"{value / divisor:.{max(4, digits)}g}{unit}"
    if size >= 1000:
        return f"{value:,.{max(0, digits - 4)}f}"
    return f"{value:.{digits}g}"


def clock(seconds: float) -> str:
    """A time tick's label: ``45 s``, ``2 min``, ``1.5 h``, ``2 d``."""
    if seconds == 0:
        return "0"
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def _multiples(scale: Scale, step: float) -> list[float]:
    first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [f * 10.0**e for e in exponents for f in factors if low <= f * 10.0**e <= high]
        if len(found) >= count - 2:
            break
    every = max(1, math.ceil(len(found) / (count + 2)))
    return found[::every]
