"""The charts of a report as one PNG, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

from torsh_trainer.errors import ResourceError
from torsh_trainer.report.charts import PALETTE, Chart, Curve
from torsh_trainer.report.differences import hints
from torsh_trainer.report.options import OptionCatalog
from torsh_trainer.report.runs import Run
from torsh_trainer.report.together import CurveShare, caption, coincident, shares

_COLUMNS = 2
_LEGEND_COLUMNS = 4
_CAPTION_LETTERS = 90
_PIXELS_A_WIDTH = 2.3  # lengths of dashes are given in the pixels of the page's charts
_SOFT = "#5d6877"


def write_png(
    runs: Sequence[Run], charts: Sequence[Chart], path: Path, *, options: OptionCatalog
) -> None:
    """Draws ``charts`` over steps, two a row, with one legend for all, into ``path``.

    Raises:
        ResourceError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ResourceError(
            "report --png needs matplotlib, which is not installed",
            fix='pip install "torsh-trainer[report]", or leave --png out',
            library="matplotlib",
        )
    # Optional and slow to import. Figure itself, not pyplot: no display, no global state.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(_COLUMNS, len(charts))
    rows = math.ceil(len(charts) / columns)
    legend_in = 0.3 + 0.22 * math.ceil(len(runs) / _LEGEND_COLUMNS)
    figure: Any = Figure(
        figsize=(6.2 * columns, 3.1 * rows + legend_in), dpi=130, layout="constrained"
    )
    for i, chart in enumerate(charts):
        _draw(figure.add_subplot(rows, columns, i + 1), chart, [_plain(r.name) for r in runs])
    line: Any = Line2D
    figure.legend(
        [line([], [], color=_color(i), linestyle=_style(i)) for i in range(len(runs))],
        [_plain(f"{r.name}  {hint}") for r, hint in zip(runs, hints(runs, options), strict=True)],
        loc="outside upper center",
        ncols=min(_LEGEND_COLUMNS, len(runs)),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path)


def _draw(axes: Any, chart: Chart, names: Sequence[str]) -> None:
    groups = coincident(chart.curves, "step")
    shared = shares(chart.curves, groups)
    for i, curve in enumerate(chart.curves):
        _line(axes, curve, shared.get(i), scale=100.0 if chart.percent else 1.0)
    if chart.log:
        axes.set_yscale("log")
    if chart.zero:
        axes.set_ylim(bottom=0)
    axes.set_title(_plain(chart.title) + (" (%)" if chart.percent else ""), loc="left", fontsize=10)
    if chart.note:
        axes.set_title(chart.note, loc="right", fontsize=7, color=_SOFT)
    axes.set_xlabel("step", fontsize=8, loc="right")
    if groups:
        told = fill(caption(chart.curves, groups, names), _CAPTION_LETTERS)
        axes.annotate(told, (0, -0.13), xycoords="axes fraction", va="top", fontsize=7, color=_SOFT)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e8ebf0", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Any, curve: Curve, share: CurveShare | None, *, scale: float) -> None:
    steps = [point.step for point in curve.points]
    values = [math.nan if p.value is None else scale * p.value for p in curve.points]
    few = len(curve.points) <= 30
    style: Any = "--" if curve.dashed else _style(curve.run)
    size = 3.0
    if share is not None:
        # A phase is positive here, and lengths count widths of the line.
        style = (-share.offset % (share.pitch * share.turns), share.dashes)
        style = (style[0] / _PIXELS_A_WIDTH, tuple(length / _PIXELS_A_WIDTH for length in style[1]))
        size *= share.radius / 2.6
    axes.plot(
        steps,
        values,
        color=_color(curve.run),
        linestyle=style,
        dash_capstyle="butt",
        linewidth=0.9 if curve.faint else 1.6,
        alpha=0.3 if curve.faint else 1.0,
        marker="o" if few else None,
        markersize=size,
        zorder=2 if curve.faint else 3,
    )


def _plain(text: str) -> str:
    """``text`` as it stands: matplotlib reads a formula between two dollars."""
    return text.replace("$", r"\$")


def _color(run: int) -> str:
    return PALETTE[run % len(PALETTE)][0]


def _style(run: int) -> str:
    return "--" if run // len(PALETTE) % 2 else "-"
