"""Which curves of a chart coincide, and how each of them is seen all the same; no drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torsh_trainer.report.charts import Axis, Curve, position
from torsh_trainer.report.runs import Point

TOLERANCE = 1e-4
"""How far apart, relative to the larger, two values may be that count as one."""

_NAMES = 6  # about so many runs are named in a caption
_SOLID_PX, _DASH_PX, _PITCH_PX = 14.0, 6.0, 10.0
_LONGEST_PERIOD_PX = 120.0
_DOT_PX, _RING_PX, _RINGS_PX = 2.6, 2.2, 4.4


@dataclass(frozen=True)
class CurveShare:
    """The part of a common line that one of ``turns`` curves draws, number ``turn`` from 0.

    ``group`` is the number of that line in its chart. Of every ``turns`` dashes of ``pitch``
    pixels it draws one, ``on`` pixels long.
    """

    group: int
    turn: int
    turns: int
    on: float
    pitch: float

    @property
    def dashes(self) -> tuple[float, float]:
        """Pixels drawn, and pixels left to the others."""
        return self.on, self.pitch * self.turns - self.on

    @property
    def offset(self) -> float:
        """Pixels from the start of the line to the first dash."""
        return self.pitch * self.turn

    @property
    def radius(self) -> float:
        """Of a dot: each one behind another shows as a ring around it."""
        ring = min(_RING_PX, _RINGS_PX / (self.turns - 1))
        return _DOT_PX + ring * (self.turns - 1 - self.turn)


def coincident(curves: Sequence[Curve], axis: Axis) -> list[list[int]]:
    """Groups of curves, by their numbers, that are within ``TOLERANCE`` wherever both are drawn.

    A curve that ends early coincides as far as it goes. What stands faintly behind is left out.
    """
    candidates = [
        i
        for i, curve in enumerate(curves)
        if not curve.faint and sum(p.value is not None for p in curve.points) > 1
    ]
    groups: list[list[int]] = []
    for i in sorted(candidates, key=lambda i: -len(curves[i].points)):
        home = next((g for g in groups if _coincide(curves[g[0]], curves[i], axis)), None)
        if home is None:
            groups.append([i])
        else:
            home.append(i)
    return sorted(sorted(group) for group in groups if len(group) > 1)


def shares(curves: Sequence[Curve], groups: Sequence[Sequence[int]]) -> dict[int, CurveShare]:
    """What each curve of ``groups``, by its number, draws of the line that they have in common."""
    found = {}
    for number, group in enumerate(groups):
        turns = len(group)
        solid = max(_DASH_PX, min(_SOLID_PX, _LONGEST_PERIOD_PX / turns))
        for turn, i in enumerate(group):
            on, pitch = (_DASH_PX, _PITCH_PX) if curves[i].dashed else (solid, solid)
            found[i] = CurveShare(number, turn, turns, on, pitch)
    return found


def caption(curves: Sequence[Curve], groups: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """``3 runs coincide: a, b, c (within 0.01%)``; empty where none do."""
    splits = {curve.split for curve in curves}
    found: dict[tuple[int, ...], set[str]] = {}
    early = False
    for group in groups:
        found.setdefault(tuple(curves[i].run for i in group), set()).add(curves[group[0]].split)
        early |= len({len(curves[i].points) for i in group}) > 1
    if not found:
        return ""
    told = []
    for runs, of in found.items():
        where = "" if of == splits else f" in {' and '.join(sorted(of))}"
        shown = len(runs) if len(runs) <= _NAMES + 1 else _NAMES  # never "and 1 more"
        more = f" and {len(runs) - shown} more" if shown < len(runs) else ""
        listed = ", ".join(names[run] for run in runs[:shown])
        told.append(f"{len(runs)} runs coincide{where}: {listed}{more}")
    reach = ", as far as each goes" if early else " at every point"
    return f"{'; '.join(told)} (within {100 * TOLERANCE:g}%{reach})"


def _coincide(longer: Curve, shorter: Curve, axis: Axis) -> bool:
    if (longer.split, longer.dashed) != (shorter.split, shorter.dashed):
        return False
    return all(
        _close(position(a, axis), position(b, axis)) and _equal(a, b)
        for a, b in zip(longer.points, shorter.points, strict=False)
    )


def _equal(a: Point, b: Point) -> bool:
    if a.value is None or b.value is None:
        return a.value is b.value
    return _close(a.value, b.value)


def _close(a: float, b: float) -> bool:
    # All are held against the longest curve: half the tolerance each, so that any two keep it.
    return abs(a - b) <= 0.5 * TOLERANCE * max(abs(a), abs(b))
