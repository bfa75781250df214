"""Two records side by side: how far apart, and where they first part by more than is allowed.

Differences are relative: of a loss, a norm or a rate to the reference's; of a parameter to the
largest element of its tensor, or to a hundredth of the largest of the model where that is more. (A
bias in front of a normalisation has no gradient but rounding: measured by itself, noise would count
as a difference.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torsh_trainer.verify.record import Arrays, Record

Quantity = Literal["loss", "grad_norm", "lr", "loss_scale", "parameters"]
QUANTITIES: tuple[Quantity, ...] = ("loss", "grad_norm", "lr", "loss_scale", "parameters")
"""In the order of cause and effect within a step."""

_FLOOR = 0.01  # of the model's largest element
_TINY = 1e-30


@dataclass(frozen=True)
class Difference:
    """How far a number is from the reference's; ``worst`` names the parameter, if it is one."""

    absolute: float
    relative: float
    worst: str = ""


@dataclass(frozen=True)
class Bounds:
    """The relative difference that is allowed after one step; after k steps it is k times as much.

    Every step rounds anew, so that a difference that is rounding grows with their number.
    ``parameters`` None does not judge them.
    """

    values: float
    parameters: float | None

    def limit_after(self, quantity: Quantity, step: int) -> float:
        """What is allowed after ``step`` steps; rate and loss scale are the same arithmetic."""
        if quantity in ("lr", "loss_scale"):
            return 1e-9
        bound = self.parameters if quantity == "parameters" else self.values
        return math.inf if bound is None else bound * max(1, step)


@dataclass(frozen=True)
class Moment:
    """A step of the run that is verified; ``differences`` of step 0 are of parameters alone."""

    step: int
    differences: Mapping[Quantity, Difference]
    mine: Mapping[str, Any]
    reference: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A run held against the reference, step by step."""

    bounds: Bounds
    moments: tuple[Moment, ...]

    def largest(self, quantity: Quantity) -> tuple[int, Difference] | None:
        """The largest absolute and relative difference, and the step of the latter; or None."""
        found = [(m.step, d) for m in self.moments if (d := m.differences.get(quantity))]
        if not found:
            return None
        step, furthest = max(found, key=lambda pair: pair[1].relative)
        return step, replace(furthest, absolute=max(d.absolute for _, d in found))

    def first_of(self, quantity: Quantity) -> int | None:
        """The first step at which a quantity differs at all; None where it never does."""
        for moment in self.moments:
            difference = moment.differences.get(quantity)
            if difference is not None and difference.absolute > 0:
                return moment.step
        return None

    @property
    def first(self) -> tuple[Moment, Quantity] | None:
        """The first moment that is beyond its bound, and the quantity that parted first."""
        for moment in self.moments:
            for quantity in QUANTITIES:
                difference = moment.differences.get(quantity)
                allowed = self.bounds.limit_after(quantity, moment.step)
                if difference is not None and difference.relative > allowed:
                    return moment, quantity
        return None

    def before(self, moment: Moment) -> Moment | None:
        """The moment just before."""
        found = [m for m in self.moments if m.step == moment.step - 1]
        return found[0] if found else None


def compare(mine: Record, reference: Record, bounds: Bounds) -> Comparison:
    """Every step of ``mine`` held against the same step of ``reference``."""
    moments = []
    for row, expected in zip(mine.rows, reference.rows, strict=True):
        step = row["step"]
        differences: dict[Quantity, Difference] = {}
        for quantity in QUANTITIES[:-1]:
            if quantity in expected and quantity in row:
                differences[quantity] = of_numbers(row[quantity], expected[quantity])
        differences["parameters"] = of_arrays(mine.parameters(step), reference.parameters(step))
        moments.append(Moment(step, differences, row, expected))
    return Comparison(bounds, tuple(moments))


def of_numbers(mine: float | None, expected: float | None) -> Difference:
    """How far two numbers are apart; what is equally not finite is equal."""
    if mine is None or expected is None:
        return Difference(0.0, 0.0) if mine is expected else Difference(math.inf, math.inf)
    if not (math.isfinite(mine) and math.isfinite(expected)):
        same = mine == expected or (math.isnan(mine) and math.isnan(expected))
        return Difference(0.0, 0.0) if same else Difference(math.inf, math.inf)
    absolute = abs(mine - expected)
    return Difference(absolute, absolute / max(abs(expected), _TINY))


def of_arrays(mine: Arrays, expected: Arrays) -> Difference:
    """The largest differences of any tensor; one that the other does not have is infinitely far."""
    for name in sorted({*mine, *expected}):
        if name not in mine or name not in expected or mine[name].shape != expected[name].shape:
            return Difference(math.inf, math.inf, name)
    largest = {name: _largest(array) for name, array in expected.items()}
    floor = _FLOOR * max(largest.values(), default=0.0)
    absolute, relative, worst = 0.0, 0.0, ""
    for name, array in expected.items():
        # In double precision; NaN, wherever it comes from, is far from everything.
        apart = _largest(mine[name].astype("float64") - array.astype("float64"))
        if math.isnan(apart):
            return Difference(math.inf, math.inf, name)
        absolute = max(absolute, apart)
        share = apart / max(largest[name], floor, _TINY)
        if share > relative:
            relative, worst = share, name
    return Difference(absolute, relative, worst)


def _largest(array: Any) -> float:
    return float(abs(array).max()) if array.size else 0.0
