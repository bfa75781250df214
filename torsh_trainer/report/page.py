"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from typing import Any

from torsh_trainer import __version__
from torsh_trainer.report.charts import PALETTE, Axis, Chart, axes_of
from torsh_trainer.report.differences import differences, hints
from torsh_trainer.report.options import OptionCatalog
from torsh_trainer.report.runs import Run
from torsh_trainer.report.svg import AXIS_TITLES, color_class, svg_of
from torsh_trainer.report.tables import Cell, Ranking, fact_texts, ranking, results

_KEYS_ACROSS = 8  # up to so many differing keys, runs are the rows
_LONG_TEXT = 200
_BEST_ROW = ' class="best-run"'
_BADGE = ' <b class="badge">best</b>'


def page_of(
    runs: Sequence[Run], charts: Sequence[Chart], *, now: datetime, options: OptionCatalog
) -> str:
    """One self-contained page on ``runs``; ``options`` know their strategies by name."""
    ranked = ranking(runs)
    axes = axes_of(runs)
    names = [run.name for run in runs]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = [
        _problems(runs),
        _results(runs, options, ranked),
        _tools(runs, axes, options, ranked),
        _charts(charts, axes, names),
        _differences(runs, options),
        _details(runs),
    ]
    return document(title, "training report", body, names=names, axes=axes, now=now)


def document(
    title: str,
    kind: str,
    body: Sequence[str],
    *,
    names: Sequence[str],
    axes: Sequence[Axis],
    now: datetime,
) -> str:
    """A self-contained page of HTML; ``names`` are those of the curves, by their number."""
    own = files(__package__)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)} · {kind}</title>",
        f"<style>{own.joinpath('page.css').read_text('utf-8')}{_colors(axes)}</style></head><body>",
        f"<header><h1>{escape(title)}</h1>",
        f'<p class="soft">{kind.capitalize()}, {now:%d %B %Y, %H:%M}</p></header>',
        *_axis_inputs(axes),
        "<main>",
        *body,
        "</main>",
        f"<footer>ToRSh Trainer {__version__}</footer>",
        f'<script type="application/json" id="runs">{_names(names)}</script>',
        f"<script>{own.joinpath('page.js').read_text('utf-8')}</script>",
        "</body></html>",
    ]
    return "\n".join(parts)


def _colors(axes: Sequence[Axis]) -> str:
    """The palette in both schemes, and which charts the chosen x axis shows."""
    light = "".join(f".c{i}{{--c:{pair[0]}}}" for i, pair in enumerate(PALETTE))
    dark = "".join(f".c{i}{{--c:{pair[1]}}}" for i, pair in enumerate(PALETTE))
    chosen = "".join(
        f"#x-{axis}:checked~main .by-{axis}{{display:block}}"
        f"#x-{axis}:checked~main label[for=x-{axis}]"
        "{background:var(--mark);color:var(--accent);font-weight:600}"
        for axis in axes
    )
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}{chosen}"


def _axis_inputs(axes: Sequence[Axis]) -> list[str]:
    """Radio buttons before everything that they switch, so that no script is needed."""
    return [
        f'<input class="axis-choice" type="radio" name="x" id="x-{axis}"'
        f"{' checked' if axis == 'step' else ''}>"
        for axis in axes
    ]


def _tools(
    runs: Sequence[Run], axes: Sequence[Axis], options: OptionCatalog, ranked: Ranking | None
) -> str:
    chips = [
        chip(i, run.name, hint, best=_is_best(i, runs, ranked))
        for i, (run, hint) in enumerate(zip(runs, hints(runs, options), strict=True))
    ]
    choices = [f'<label for="x-{axis}">{AXIS_TITLES[axis]}</label>' for axis in axes]
    return (
        f'<div class="tools"><div class="legend">{"".join(chips) if len(runs) > 1 else ""}</div>'
        f'<div class="axes"><span>x axis</span>{"".join(choices)}</div></div>'
    )


def chip(i: int, name: str, hint: str = "", *, best: bool = False) -> str:
    """The switch of curve number ``i`` in a legend."""
    return (
        f'<label class="{color_class(i)}"><input type="checkbox" checked>{swatch(i)}'
        f"{escape(name)}{_BADGE if best else ''}{_small(hint)}</label>"
    )


def _charts(charts: Sequence[Chart], axes: Sequence[Axis], names: Sequence[str]) -> str:
    if not charts:
        return "<p>There is nothing to draw: no run has logged a number yet.</p>"
    return cards(charts, axes, names)


def cards(charts: Sequence[Chart], axes: Sequence[Axis], names: Sequence[str]) -> str:
    """The charts side by side, each on a card of its own; ``names`` are those of the curves."""
    cards = []
    for chart in charts:
        note = "; ".join(filter(None, [chart.note, "log scale" if chart.log else ""]))
        cards.append(
            f'<section class="card chart" id="{escape(chart.key)}"><header>'
            f"<h3>{escape(chart.title)}</h3>"
            f'<span class="note">{escape(note)}</span></header>'
            f"{''.join(svg_of(chart, axis, names) for axis in axes)}</section>"
        )
    return f'<div class="charts">{"".join(cards)}</div>'


def _problems(runs: Sequence[Run]) -> str:
    notes: dict[str, list[str]] = {}
    for run in runs:
        for note in (*_failure(run), *run.problems):
            notes.setdefault(note, []).append(run.name)
    told = [
        f"<p><b>{escape(', '.join(who))}</b>: {escape(note)}</p>" for note, who in notes.items()
    ]
    return f'<div class="card problems">{"".join(told)}</div>' if told else ""


def _failure(run: Run) -> list[str]:
    """That a run failed, why, and what would help, on one line."""
    error = run.result.get("error")
    if not error:
        return []
    words = [error.get("message"), error.get("fix")] if isinstance(error, dict) else [error]
    said = "; ".join(" ".join(str(word).split()) for word in words if word)
    return [f"{run.state}: {said or error}"]


def _results(runs: Sequence[Run], options: OptionCatalog, ranked: Ranking | None) -> str:
    columns, rows = results(runs, options, ranked)
    kinds = [any(row[i].number for row in rows) for i in range(len(columns))]
    head = "".join(
        f"<th{_number_class(kind)}>{escape(name)}</th>"
        for name, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        f'<tr data-points="{len(run.rows)}"{_BEST_ROW if best else ""}>'
        f"{_run_cell(i, run, hint, best=best)}{''.join(_cell(cell) for cell in row)}</tr>"
        for i, (run, row, hint) in enumerate(zip(runs, rows, hints(runs, options), strict=True))
        for best in [_is_best(i, runs, ranked)]
    )
    starred = any(cell.best for row in rows for cell in row)
    return _verdict(runs, ranked, starred=starred) + table("results", f"<th>run</th>{head}", body)


def _verdict(runs: Sequence[Run], ranked: Ranking | None, *, starred: bool) -> str:
    """Which run is best, by what, and what the stars say."""
    if ranked is None:
        return ""
    way = "higher" if ranked.better > 0 else "lower"
    by = f"<b>{escape(ranked.column)}</b>, {way} is better ({escape(ranked.reason)})"
    if len(ranked.best) == sum(run.state == "done" for run in runs):
        said = f"Equal in {by}: all runs that are done."
    else:
        names = ", ".join(runs[i].name for i in ranked.best)
        equal = ", equal as far as shown" if len(ranked.best) > 1 else ""
        said = f"Best by {by}: <b>{escape(names)}</b>{equal}."
    stars = ' <span class="soft">★ is the best of a column.</span>' if starred else ""
    return f'<p class="verdict">{said}{stars}</p>'


def _is_best(i: int, runs: Sequence[Run], ranked: Ranking | None) -> bool:
    done = sum(run.state == "done" for run in runs)
    return ranked is not None and i in ranked.best and len(ranked.best) < done


def _cell(cell: Cell) -> str:
    if cell.text in ("done", "failed", "interrupted", "unfinished"):
        return f'<td class="{cell.text}">{cell.text}</td>'
    classes = " ".join(filter(None, ["number" * cell.number, "best" * cell.best]))
    return (
        f'<td class="{classes}">{escape(cell.text)}</td>'
        if classes
        else (f"<td>{escape(cell.text)}</td>")
    )


def _differences(runs: Sequence[Run], options: OptionCatalog) -> str:
    if len(runs) < 2 or not any(run.config for run in runs):
        return ""
    found = differences(runs, options)
    if not found.listed:
        same = (
            f"All {found.agreeing} keys agree."
            if found.agreeing
            else "No run left a configuration."
        )
        return f"<h2>Configuration</h2><p>{same}</p>"
    folded = ""
    if found.folded:
        nodes = ", ".join(node for node in found.listed if node in found.named)
        told = f"{len(found.folded)} knobs that come with {nodes}, at their defaults"
        folded = (
            f'<details class="card"><summary>{escape(told)}</summary>'
            f"{_keys_down(runs, found.folded, 'defaults')}</details>"
        )
    if len(found.listed) <= _KEYS_ACROSS:
        head = "<th>run</th>" + "".join(f"<th>{escape(key)}</th>" for key in found.listed)
        body = "".join(
            f"<tr>{_run_cell(i, run)}{''.join(_value(v[i]) for v in found.listed.values())}</tr>"
            for i, run in enumerate(runs)
        )
        listed = table("differences", head, body)
    else:
        listed = _keys_down(runs, found.listed, "differences")
    return (
        f"<h2>Where configurations differ</h2>{listed}"
        f'<p class="soft">{found.agreeing} other keys agree.</p>{folded}'
    )


def _keys_down(runs: Sequence[Run], keys: Mapping[str, list[Any]], name: str) -> str:
    """A table with a row for each key and a column for each run."""
    head = "<th>key</th>" + "".join(
        f'<th class="{color_class(i)}">{swatch(i)} {escape(run.name)}</th>'
        for i, run in enumerate(runs)
    )
    body = "".join(
        f"<tr><th>{escape(key)}</th>{''.join(map(_value, values))}</tr>"
        for key, values in keys.items()
    )
    return table(name, head, body)


def _details(runs: Sequence[Run]) -> str:
    blocks = []
    for run in runs:
        facts = {"run directory": str(run.path), **run.provenance}
        sections = [_facts(fact_texts(facts))]
        if run.config:
            sections.append(
                f"<details><summary>Configuration</summary>{_facts(fact_texts(run.config))}</details>"
            )
        blocks.append(
            f'<details class="card"><summary>{escape(run.name)}</summary>'
            f"{''.join(sections)}</details>"
        )
    return f"<h2>Where the runs come from</h2>{''.join(blocks)}"


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = []
    for key, text in facts:
        shown = f"<code>{escape(text)}</code>"
        if len(text) > _LONG_TEXT or "\n" in text:
            shown = (
                f"<details><summary>{len(text):,} characters</summary>"
                f"<pre>{escape(text)}</pre></details>"
            )
        rows.append(f"<tr><td>{escape(key)}</td><td>{shown}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def table(name: str, head: str, body: str) -> str:
    """A table on a card: cells of the head, rows of the body."""
    return (
        f'<div class="card scroll"><table id="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _run_cell(i: int, run: Run, hint: str = "", *, best: bool = False) -> str:
    badge = _BADGE if best else ""
    return f'<th class="{color_class(i)}">{swatch(i)}{escape(run.name)}{badge}{_small(hint)}</th>'


def _small(hint: str) -> str:
    return f" <small>{escape(hint)}</small>" if hint else ""


def swatch(i: int) -> str:
    """The colour of curve number ``i``, as a short line."""
    dashed = " dashed" if i // len(PALETTE) % 2 else ""
    return f'<span class="swatch{dashed}"></span>'


def _value(value: object) -> str:
    text = "null" if value is None else str(value)
    return f'<td class="value" title="{escape(text)}">{escape(text)}</td>'


def _number_class(number: bool) -> str:
    return ' class="number"' if number else ""


def _names(names: Sequence[str]) -> str:
    content = {"names": list(names), "colors": len(PALETTE)}
    return json.dumps(content).replace("<", "\\u003c")
