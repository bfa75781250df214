"""The verdict as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from textwrap import fill

from torsh_trainer.verify.compare import Difference, Quantity
from torsh_trainer.verify.running import RungOutcome, Verdict, bounds_of

WIDTH = 100
RUNG_WORDS = {
    "sgd": "plain SGD, constant rate, no clipping",
    "recipe": "the recipe as it is",
}
COLUMNS: tuple[tuple[Quantity, str], ...] = (
    ("loss", "max |d loss|"),
    ("grad_norm", "max |d grad norm|"),
    ("parameters", "max |d parameter|"),
)
WORDS = {
    "reference": "reference",
    "agrees": "agrees",
    "apart": "APART",
    "refused": "refused",
    "missing": "missing",
    "failed": "failed",
}


def text_of(verdict: Verdict) -> str:
    """A table for every rung, and a sentence on everything that is not well."""
    return "\n\n".join(_block(verdict, rung) for rung in verdict.options.ladder)


def number(difference: Difference | None) -> str:
    """``3.6e-07 (1.2e-07)``: absolute, and relative to the reference; a dash for none."""
    if difference is None:
        return "-"
    return f"{_short(difference.absolute)} ({_short(difference.relative)})"


def describe_bound(verdict: Verdict, rung: str) -> str:
    """What is allowed on a rung, in words."""
    bounds = bounds_of(verdict.options, verdict.precision, rung)
    judged = "" if bounds.parameters is not None else "; parameters are shown, not judged"
    return f"allowed: {bounds.values:.2g} relative after one step, k times as much after k{judged}"


def processes_words(count: int) -> str:
    """``1 process``, ``2 processes``."""
    return f"{count} process{'' if count == 1 else 'es'}"


def of_rung(verdict: Verdict, rung: str) -> list[RungOutcome]:
    """The outcomes of a rung, in the order of the list."""
    return [outcome for outcome in verdict.outcomes if outcome.rung == rung]


def _block(verdict: Verdict, rung: str) -> str:
    outcomes = of_rung(verdict, rung)
    rows = [["strategy", "processes", *(title for _, title in COLUMNS), "first", ""]]
    rows += [_row(outcome) for outcome in outcomes]
    head = f"{rung}: {RUNG_WORDS[rung]}, {verdict.options.steps} steps of {verdict.batch_words}"
    told = filter(None, map(sentence_of, outcomes))
    sentences = [fill(text, WIDTH, subsequent_indent="  ") for text in told]
    order = [verdict.order] if verdict.order else []
    return "\n".join(
        [head, *_align_columns(rows), describe_bound(verdict, rung), *order, *sentences]
    )


def _row(outcome: RungOutcome) -> list[str]:
    cells = ["-"] * len(COLUMNS)
    if outcome.comparison is not None:
        cells = [number((outcome.comparison.largest(q) or (0, None))[1]) for q, _ in COLUMNS]
    first = f"step {outcome.suspect.step}" if outcome.suspect else "-"
    name, many = outcome.entry.label, str(outcome.processes)
    return [name, many, *cells, first, WORDS[outcome.status]]


def _align_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  " + "  ".join(cells).rstrip()


def sentence_of(outcome: RungOutcome) -> str:
    """What is not well with an outcome: the suspect, or why it did not run; empty if it is well."""
    suspect = outcome.suspect
    if suspect is None:
        return f"{outcome.entry.label}: {outcome.words}" if outcome.words else ""
    when = "before the first step" if suspect.step == 0 else f"at step {suspect.step}"
    return (
        f"{outcome.entry.label}: {suspect.quantity.replace('_', ' ')} parts first, {when}. "
        f"Suspect: {suspect.rule}. {suspect.because[:1].upper()}{suspect.because[1:]}"
    )


def _short(value: float) -> str:
    return "0" if value == 0 else "inf" if math.isinf(value) else f"{value:.1e}"
