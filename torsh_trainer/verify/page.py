"""The verdict as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from torsh_trainer.report.charts import Chart, Curve
from torsh_trainer.report.page import cards, chip, document, swatch, table
from torsh_trainer.report.runs import Point
from torsh_trainer.report.svg import color_class
from torsh_trainer.verify.compare import Quantity
from torsh_trainer.verify.running import RungOutcome, Verdict, bounds_of
from torsh_trainer.verify.table import (
    COLUMNS,
    RUNG_WORDS,
    WORDS,
    describe_bound,
    number,
    of_rung,
    sentence_of,
)
from torsh_trainer.verify.written import write_text

_CURVES: tuple[tuple[str, str], ...] = (
    ("loss", "Training loss"),
    ("grad_norm", "Gradient norm before clipping"),
    ("lr", "Learning rate"),
)
_APART: tuple[tuple[Quantity, str], ...] = (
    ("loss", "Relative difference of the loss"),
    ("grad_norm", "Relative difference of the gradient norm"),
    ("parameters", "Relative difference of the parameters"),
)
_CLASSES = {"reference": "", "agrees": "done", "apart": "failed", "failed": "failed"}
_ALLOWED = "allowed"


def write(verdict: Verdict, home: Path) -> Path:
    """Writes ``verify.html`` into ``home``; returns its path.

    Raises:
        ResourceError: the disk refused.
    """
    return write_text(home / "verify.html", page_of(verdict, now=datetime.now()))


def page_of(verdict: Verdict, *, now: datetime) -> str:
    """One self-contained page: tables, sentences, curves and their differences."""
    labels = [entry.label for entry in verdict.options.entries]
    names = [*labels, _ALLOWED]
    legend = "".join(chip(i, name) for i, name in enumerate(names))
    body = [f'<div class="tools"><div class="legend">{legend}</div></div>']
    for rung in verdict.options.ladder:
        outcomes = of_rung(verdict, rung)
        body += [
            f"<h2>{escape(rung)}: {escape(RUNG_WORDS[rung])}</h2>",
            _table(rung, outcomes),
            f'<p class="soft">{escape(describe_bound(verdict, rung))}</p>',
            f'<p class="soft">{escape(verdict.order)}</p>' if verdict.order else "",
            *(f"<p>{escape(sentence_of(o))}</p>" for o in outcomes if sentence_of(o)),
            cards(_charts(verdict, rung, outcomes), ["step"], names),
        ]
    title = f"{verdict.recipe or 'a task'}: {', '.join(labels)}"
    return document(title, "verification", body, names=names, axes=["step"], now=now)


def _table(rung: str, outcomes: Sequence[RungOutcome]) -> str:
    heads = ("processes", *(title for _, title in COLUMNS), "first")
    numbers = "".join(f'<th class="number">{escape(title)}</th>' for title in heads)
    head = f"<th>strategy</th>{numbers}<th></th>"
    rows = []
    for i, outcome in enumerate(outcomes):
        comparison, suspect = outcome.comparison, outcome.suspect
        found = [comparison.largest(q) if comparison else None for q, _ in COLUMNS]
        cells = [str(outcome.processes), *(number(f and f[1]) for f in found)]
        cells.append(f"step {suspect.step}" if suspect else "-")
        rows.append(
            f'<tr><th class="{color_class(i)}">{swatch(i)}{escape(outcome.entry.label)}</th>'
            + "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
            + f'<td class="{_CLASSES.get(outcome.status, "unfinished")}">'
            f"{WORDS[outcome.status]}</td></tr>"
        )
    return table(f"verdict-{rung}", head, "".join(rows))


def _charts(verdict: Verdict, rung: str, outcomes: Sequence[RungOutcome]) -> list[Chart]:
    charts = []
    for name, title in _CURVES:
        curves = [
            Curve(i, "train", tuple(_point(row["step"], row.get(name)) for row in outcome.rows[1:]))
            for i, outcome in enumerate(outcomes)
            if outcome.rows
        ]
        charts.append(Chart(f"{rung}-{name}", title, tuple(curves)))
    charts += [_differences(verdict, rung, outcomes, q, title) for q, title in _APART]
    return [chart for chart in charts if chart.values()]


def _differences(
    verdict: Verdict, rung: str, outcomes: Sequence[RungOutcome], quantity: Quantity, title: str
) -> Chart:
    curves = []
    for i, outcome in enumerate(outcomes):
        if outcome.comparison is not None:
            points = [
                # A logarithm has no place for 0: what is equal is a gap.
                _point(m.step, m.differences[quantity].relative or None)
                for m in outcome.comparison.moments
                if quantity in m.differences
            ]
            curves.append(Curve(i, "train", tuple(points)))
    bounds = bounds_of(verdict.options, verdict.precision, rung)
    steps = range(1, verdict.options.steps + 1)
    allowed = tuple(_point(step, bounds.limit_after(quantity, step)) for step in steps)
    if curves and any(point.value is not None for point in allowed):
        curves.append(Curve(len(outcomes), "train", allowed, dashed=True))
    note = "equal where there is no point"
    return Chart(f"{rung}-d-{quantity}", title, tuple(curves), note=note, log=True)


def _point(step: int, value: float | None) -> Point:
    finite = value is not None and abs(value) != float("inf") and value == value
    return Point(step, 0, 0.0, value if finite else None)
