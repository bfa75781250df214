"""The test matrix as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torsh_trainer.testing.compare import Tolerance
from torsh_trainer.testing.guarantees.reading import (
    ARITHMETICS,
    NEEDED,
    Case,
    Matrix,
    Moves,
    Property,
    TestReference,
)
from torsh_trainer.testing.strategy import CAPABILITIES

HEAD = """\
# Guarantees

What equals what, to which bound, by which test. This page is written by `make guarantees` from
the tests themselves, and a test fails when it says anything else; nobody edits it by hand. To see
one of them hold, run its test:

    .venv/bin/python -m pytest tests/distributed/test_contract_ddp.py::TestDDP

To see it with your own recipe, on your own machine: [`verify`](verify.md).

**How to read the numbers.** The expected value is plain PyTorch on one process, written out as a
loop (`torsh_trainer/testing/reference.py`) and computed in the same test; the ranks are real
processes. A bound is relative: of losses and gradient norms to the expected number, of parameters
and optimizer state to the largest element of each tensor. The loss of the first step has a bound
of its own, since no gradient has entered it yet. Where each number comes from is written beside
it in `torsh_trainer/testing/compare.py`.
"""
STRATEGIES = """\
## Every strategy equals plain PyTorch

Bounds of losses, gradient norms and metrics after the first step; where parameters have another,
it stands second. *refused*: the strategy says so before the first step, and the test asserts that
it does.
"""
ASKED = """\
## What each can be asked for

yes: it does it, and equals plain PyTorch doing it. no: it refuses it by name, with the reason
[below](#what-is-refused-and-why).
"""
REFUSED = """\
## What is refused, and why

An option that a strategy cannot honour is an error before the first step. None is ignored in
silence.
"""
PROPERTIES = """\
## Rule by rule

Every rule is a test of `StrategyContract`, run for every line of the tables above on each of its
numbers of ranks. *Bound* names the column of the first table.
"""
RESUME = """\
## A run goes on elsewhere

A checkpoint saved under one strategy and number of processes is loaded under another, and the run
that goes on is held against plain PyTorch that was never interrupted: same samples, losses,
gradient norms, parameters, optimizer state.
"""
MORE_RESUME = """\
Every test of resumption:
"""
FUZZED = """\
## Random combinations

The fuzzer (`python -m torsh_trainer.testing.fuzzing`) draws a task, data, an optimizer, clipping,
an average of weights, engines with their knobs, and stops and resumes between them; each is held
against plain PyTorch. The last run, with torch {torch}:
"""
MEANINGS = {
    "agrees": "losses, gradient norms, parameters and metrics within rounding",
    "refused": "one sentence before the first step",
    "told": "differs, and the run names the buffers that its forwards change",
    "plain fails": "plain PyTorch does not train it either",
    "DIFFERS": "wrong without a word",
    "CRASHES": "ends in an error that is no sentence of ours",
}
OTHERS = {
    "CommunicatorContract": (
        "Communicators",
        "Each collective gives what its definition gives, computed by hand in the test.",
    ),
    "LauncherContract": (
        "Launchers",
        "Processes come to be, know their places, and none outlives a failure.",
    ),
    "EnvironmentContract": (
        "Environments",
        "Who am I: the variables that clusters set, read the same way everywhere.",
    ),
}
TEETH = """\
## Wrong ones are found out

A green test means something only where a wrong engine makes it red. These tests break one rule at
a time.
"""


def page_of(matrix: Matrix) -> str:
    """The whole page."""
    cases = matrix.cases["StrategyContract"]
    properties = matrix.properties["StrategyContract"]
    parts = [
        HEAD,
        STRATEGIES,
        _table(_strategy_rows(cases)),
        _exceptions(cases),
        ASKED,
        _table(_capability_rows(cases)),
        REFUSED,
        _table(_refusal_rows(cases)),
        PROPERTIES,
        _table(_property_rows(properties, cases)),
        RESUME,
        *(_moves(moves) for moves in matrix.moves),
        MORE_RESUME,
        _table(_trial_rows(matrix.resumption)),
        *_fuzzer_section(matrix),
        *_others(matrix),
        TEETH,
        _table(_trial_rows(matrix.controls)),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def _strategy_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    yield ["strategy", "ranks", "over", *ARITHMETICS, "test"]
    for case in cases:
        bounds = [
            "*refused*" if NEEDED.get(name) in case.refuses else _format_bound(case.bounds[name])
            for name in ARITHMETICS
        ]
        ranks = ", ".join(map(str, case.ranks))
        yield [f"`{case.about}`", ranks, case.backend, *bounds, f"`{case.test}`"]


def _format_bound(tolerance: Tolerance) -> str:
    values = dict.fromkeys((tolerance.relative, tolerance.parameters))
    return ", ".join(_number(value) for value in values)


def _exceptions(cases: Sequence[Case]) -> str:
    """The bounds of the first loss, which no column has."""
    usual = _number(cases[0].bounds["fp32, SGD"].first) if cases else ""
    others = [
        f"- `{case.about}`, {name}: {_number(bounds.first)}"
        for case in cases
        for name, bounds in case.bounds.items()
        if _number(bounds.first) != usual and NEEDED.get(name) not in case.refuses
    ]
    words = f"The loss of the first step: {usual} everywhere"
    return f"{words}.\n" if not others else "\n".join([f"{words}, but for", "", *others]) + "\n"


def _capability_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    yield ["strategy", *(name.replace("_", " ") for name in CAPABILITIES)]
    rows = (
        [f"`{case.about}`", *("no" if name in case.refuses else "yes" for name in CAPABILITIES)]
        for case in cases
    )
    yield from map(list, dict.fromkeys(map(tuple, rows)))


def _refusal_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    yield ["what", "refused by", "because"]
    found = dict.fromkeys(pair for case in cases for pair in case.refuses.items())
    for capability, reason in sorted(found):
        who = [case for case in cases if case.refuses.get(capability) == reason]
        yield [capability.replace("_", " "), _names(who, cases), reason]


def _property_rows(properties: Iterable[Property], cases: Sequence[Case]) -> Iterator[list[str]]:
    yield ["rule", "bound", "refused by", "test"]
    for rule in properties:
        who = [case for case in cases if rule.needs in case.refuses]
        yield [rule.sentence, rule.arithmetic, _names(who, cases), f"`{rule.name}`"]


def _names(chosen: Sequence[Case], cases: Sequence[Case]) -> str:
    """The chosen strategies; one of which every variant is chosen, by its name alone."""
    names = []
    for case in chosen:
        name = case.about.partition("(")[0]
        variants = [other for other in cases if other.about.partition("(")[0] == name]
        names.append(f"`{name if all(v in chosen for v in variants) else case.about}`")
    return ", ".join(dict.fromkeys(names))


def _moves(moves: Moves) -> str:
    sizes = "; ".join(
        f"{size} {'rank' if size == 1 else 'ranks'}: {', '.join(names)}"
        for size, names in moves.strategies.items()
    )
    steps = ", ".join(f"{before} to {after}" for before, after in moves.moves)
    bounds = ", ".join(f"{name} {_number(bound)}" for name, bound in moves.bounds.items())
    rows = [
        ["from any of, to any of", sizes],
        ["ranks before and after", steps],
        ["journeys", str(moves.journeys)],
        ["bound", bounds],
        ["test", f"`{moves.file}`"],
    ]
    return _table([["", ""], *rows])


def _fuzzer_section(matrix: Matrix) -> Iterator[str]:
    record = matrix.fuzzed
    if record is None:
        return
    yield FUZZED.format(torch=record.torch)
    rows = [
        [name, str(record.verdicts.get(name, 0)), meaning] for name, meaning in MEANINGS.items()
    ]
    yield _table(
        [["verdict", "combinations", "which means"], *rows, ["all", str(record.combinations), ""]]
    )
    if record.wrong:
        yield "\n".join(["Those that are wrong:", "", *(f"- `{line}`" for line in record.wrong)])


def _others(matrix: Matrix) -> Iterator[str]:
    for contract, (title, words) in OTHERS.items():
        cases, properties = matrix.cases[contract], matrix.properties[contract]
        if not cases:
            continue
        yield f"## {title}\n\n{words}\n"
        rows = [["", "processes", "over", "test"]]
        for case in cases:
            ranks = ", ".join(map(str, case.ranks))
            rows.append([f"`{case.about}`", ranks, case.backend, f"`{case.test}`"])
        yield _table(rows)
        rules = "; ".join(rule.sentence for rule in properties)
        yield f"`{contract}` holds each of them to: {rules}.\n"


def _trial_rows(trials: Iterable[TestReference]) -> Iterator[list[str]]:
    yield ["what is tried", "cases", "test"]
    for trial in trials:
        yield [trial.sentence, str(trial.cases), f"`{trial.file}::{trial.name}`"]


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: float) -> str:
    return f"{value:.1e}"
