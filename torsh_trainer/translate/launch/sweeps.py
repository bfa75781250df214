"""Jobs of one line that differ by the round of a loop: a sweep where our sweeps can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from torsh_trainer.translate.plan import Plan

Rounds = tuple[tuple[str, str], ...]
"""The variables of the loops around a line, with their values in one round."""


def join_rounds(rounds: Sequence[Rounds], plans: Sequence[Plan]) -> list[Plan]:
    """``plans``, one for each round, as one plan with a sweep; as they are where none can."""
    first = plans[0]
    names = list(dict.fromkeys(name for round_ in rounds for name, _ in round_))
    loop = ", ".join(
        f"{name} in {' '.join(dict.fromkeys(dict(round_)[name] for round_ in rounds))}"
        for name in names
    )
    if any(plan.facts or plan.choices != first.choices for plan in plans):
        return _apart(rounds, plans)
    keys = dict.fromkeys(key for plan in plans for key in plan.values)
    differing = [key for key in keys if len({_hash_of(plan.values.get(key)) for plan in plans}) > 1]
    if not differing:
        note = (
            f"a loop starts it {len(plans)} times ({loop}), and only the script's own arguments "
            "differ: keep the loop around the command"
        )
        return [replace(first, notes=(*first.notes, note), script=None)]
    columns = {key: _distinct([plan.values.get(key) for plan in plans]) for key in differing}
    wanted = [tuple(_hash_of(plan.values.get(key)) for key in differing) for plan in plans]
    every = [
        tuple(map(_hash_of, values)) for values in product(*(columns[key] for key in differing))
    ]
    if sorted(wanted, key=repr) != sorted(every, key=repr):
        return _apart(rounds, plans)
    texts = [f"{key}={','.join(_text(value) for value in columns[key])}" for key in differing]
    note = f"a loop ({loop}) is a sweep of {len(plans)} runs: {' '.join(texts)}"
    return [
        replace(
            first,
            sweep={key: tuple(values) for key, values in columns.items()},
            notes=(*first.notes, note),
            command=" ".join([first.command, "-m", *texts]),
            script=None,
        )
    ]


def _apart(rounds: Sequence[Rounds], plans: Sequence[Plan]) -> list[Plan]:
    """A job for each round."""
    found = []
    for round_, plan in zip(rounds, plans, strict=True):
        where = ", ".join(f"{name}={value}" for name, value in round_)
        found.append(replace(plan, source=f"{plan.source} ({where})"))
    return found


def _hash_of(value: Any) -> str:
    return repr(value)


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({_hash_of(value): value for value in values}.values())


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value).replace(" ", "")
