"""Charts as inline SVG: static pictures that a few lines of script make answer to the mouse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from torsh_trainer.report.charts import PALETTE, Axis, Chart, Curve, position, thin_out
from torsh_trainer.report.runs import Point
from torsh_trainer.report.scales import (
    Scale,
    along,
    clock,
    labels,
    linear,
    logarithmic,
    ticks,
    time_ticks,
)
from torsh_trainer.report.together import CurveShare, caption, coincident, shares

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 34
_FIELD = (  # what the mouse moves over
    f'<rect class="field" x="{_LEFT}" y="{_TOP}" width="{WIDTH - _LEFT - _RIGHT}" '
    f'height="{HEIGHT - _BOTTOM - _TOP}"/>'
)
_DOTS_UP_TO = {"train": 10, "eval": 30, "test": 30}  # points of a curve

AXIS_TITLES: dict[Axis, str] = {"step": "step", "samples": "samples", "time": "time"}


def svg_of(chart: Chart, axis: Axis, names: Sequence[str]) -> str:
    """One chart over one x axis: an ``<svg>`` element, its numbers as JSON, what coincides in it.

    ``names`` are those of the runs, by their number.
    """
    groups = coincident(chart.curves, axis)
    shared = shares(chart.curves, groups)
    curves = [
        _Drawn(curve, thin_out(curve.points), axis, shared.get(i))
        for i, curve in enumerate(chart.curves)
    ]
    xs = [x for curve in curves for x, _ in curve.finite()]
    values = [y for curve in curves for _, y in curve.finite()]
    across = along(xs, _LEFT, WIDTH - _RIGHT)
    bottom, top = HEIGHT - _BOTTOM, _TOP
    up = (
        logarithmic(values, bottom, top)
        if chart.log
        else linear(values, bottom, top, zero=chart.zero)
    )
    body = [
        *_y_axis(up, percent=chart.percent),
        *_x_axis(across, axis),
        *(curve.path(across, up) for curve in sorted(curves, key=lambda c: not c.curve.faint)),
        f'<line class="cross" y1="{top}" y2="{bottom}"/>',
        _FIELD,
    ]
    data = {
        "axis": axis,
        "percent": chart.percent,
        "x": [across.low, across.high, across.start, across.end],
        "y": [up.low, up.high, up.start, up.end, int(up.log)],
        "curves": [curve.data() for curve in curves if not curve.curve.faint],
    }
    told = escape(caption(chart.curves, groups, names))
    below = f'<p class="together">{told}</p>' if told else ""
    return (
        f'<div class="plot by-{axis}"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title)} by {axis}">{"".join(body)}</svg>'
        f'<script type="application/json">{_script_safe(data)}</script>{below}</div>'
    )


def color_class(run: int) -> str:
    """The class that gives a run its colour: one of the palette's."""
    return f"c{run % len(PALETTE)}"


class _Drawn:
    """A curve over one x axis."""

    def __init__(
        self, curve: Curve, points: Sequence[Point], axis: Axis, share: CurveShare | None
    ) -> None:
        self.curve = curve
        self.share = share
        self.points = [(position(point, axis), point.value) for point in points]

    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if y is not None]

    def path(self, across: Scale, up: Scale) -> str:
        """The line, broken where a value was not finite; dots where points are few or alone."""
        pieces: list[list[str]] = [[]]
        for x, y in self.points:
            if y is None:
                pieces.append([])
            else:
                pieces[-1].append(f"{across(x):.1f} {up(y):.1f}")
        line = "".join("M" + "L".join(piece) for piece in pieces if len(piece) > 1)
        few = len(self.points) <= _DOTS_UP_TO.get(self.curve.split, 30)
        dotted = few and not self.curve.faint
        dots = [dot for piece in pieces for dot in piece if dotted or len(piece) == 1]
        run = self.curve.run
        kind = "faint" if self.curve.faint else "dashed" if self._dashed else "solid"
        radius, dashes, turn = 2.6, "", ""
        if self.share is not None:
            radius = self.share.radius
            drawn = " ".join(f"{length:g}" for length in self.share.dashes)
            dashes = f' style="stroke-dasharray:{drawn};stroke-dashoffset:-{self.share.offset:g}"'
            turn = f' data-share="{self.share.group} {self.share.on:g} {self.share.pitch:g}"'
            kind += " shared"
        circles = "".join(
            f'<circle cx="{x}" cy="{y}" r="{radius:g}"/>' for x, y in map(str.split, dots)
        )
        path = f'<path d="{line}"{dashes}/>' if line else ""
        group = f'<g class="curve {kind} {color_class(run)}" data-run="{run}"{turn}>'
        return f"{group}{path}{circles}</g>"

    @property
    def _dashed(self) -> bool:
        """Also what tells runs apart once the colours come round again."""
        return self.curve.dashed or self.curve.run // len(PALETTE) % 2 == 1

    def data(self) -> dict[str, object]:
        return {
            "run": self.curve.run,
            "split": self.curve.split,
            "x": [round(x, 3) for x, _ in self.points],
            "y": [None if y is None else float(f"{y:.6g}") for _, y in self.points],
        }


def _y_axis(up: Scale, *, percent: bool) -> list[str]:
    parts = []
    found = ticks(up, count=5)
    for tick, said in zip(found, labels([100 * t if percent else t for t in found]), strict=True):
        y = f"{up(tick):.1f}"
        label = f"{said}%" if percent else said
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{y}" dy=".32em" text-anchor="end">'
            f"{label}</text>"
        )
    return parts


def _x_axis(across: Scale, axis: Axis) -> list[str]:
    base = HEIGHT - _BOTTOM
    timed = axis == "time"
    found = time_ticks(across, count=7) if timed else ticks(across, count=7)
    parts = [f'<line class="base" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    for tick, label in zip(found, map(clock, found) if timed else labels(found), strict=True):
        parts.append(
            f'<text class="tick" x="{across(tick):.1f}" y="{base + 17}" text-anchor="middle">'
            f"{label}</text>"
        )
    parts.append(
        f'<text class="axis" x="{WIDTH - _RIGHT}" y="{HEIGHT - 2}" text-anchor="end">'
        f"{AXIS_TITLES[axis]}</text>"
    )
    return parts


def _script_safe(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
