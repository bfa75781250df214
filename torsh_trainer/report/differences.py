"""Where the configurations of runs differ, and the few words that tell runs apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torsh_trainer.report.options import TARGET, OptionCatalog
from torsh_trainer.report.runs import Run

ABSENT = "—"
_OWN_TO_A_RUN = ("run_dir", "hydra", "launcher.log_dir")  # differ always, and say nothing
_HINT_KEYS = 3


@dataclass(frozen=True)
class Differences:
    """Dotted keys with a value for each run, ``ABSENT`` where a run has none.

    ``listed`` says where runs differ; where their classes do (``strategy``), the options' names
    stand for them. ``folded`` are the knobs that come with those options, as they are unless set.
    ``agreeing`` counts the keys that are the same in all runs.
    """

    listed: Mapping[str, list[Any]]
    folded: Mapping[str, list[Any]]
    agreeing: int
    named: frozenset[str]


def differences(runs: Sequence[Run], options: OptionCatalog) -> Differences:
    """Where the configurations of ``runs`` differ."""
    differing: dict[str, list[Any]] = {}
    agreeing = 0
    for key in dict.fromkeys(key for run in runs for key in run.config):
        if key.startswith(_OWN_TO_A_RUN):
            continue
        values = [run.config.get(key, ABSENT) for run in runs]
        if any(str(value) != str(values[0]) for value in values):
            differing[key] = values
        else:
            agreeing += 1
    nodes = _outermost(key.removesuffix(f".{TARGET}") for key in differing if _is_class(key))
    chosen = {node: [options.find_option(run.config, node) for run in runs] for node in nodes}
    listed: dict[str, list[Any]] = {}
    folded: dict[str, list[Any]] = {}
    for key, values in differing.items():
        node = next((node for node in nodes if key.startswith(f"{node}.")), None)
        if node is None:
            listed[key] = values
        elif key == f"{node}.{TARGET}":
            listed[node] = [ABSENT if option is None else option.name for option in chosen[node]]
        else:
            knob = key.removeprefix(f"{node}.")
            untouched = all(
                value == ABSENT or (option is not None and _is_default(value, option.knobs, knob))
                for value, option in zip(values, chosen[node], strict=True)
            )
            (folded if untouched else listed)[key] = values
    return Differences(listed, folded, agreeing, frozenset(nodes))


def hints(runs: Sequence[Run], options: OptionCatalog) -> list[str]:
    """A few words on what sets each run apart: ``lr=0.01 strategy=fsdp``; or nothing."""
    found = differences(runs, options)
    # A knob that some strategies lack says less than the strategy.
    keys = {
        key: values
        for key, values in found.listed.items()
        if ABSENT not in values or not any(key.startswith(f"{node}.") for node in found.named)
    }
    if not 0 < len(keys) <= _HINT_KEYS:
        return ["" for _ in runs]
    return [
        " ".join(
            f"{key.rpartition('.')[2]}={_short(values[i])}"
            for key, values in keys.items()
            if values[i] != ABSENT
        )
        for i in range(len(runs))
    ]


def strategy_of(run: Run, options: OptionCatalog) -> str:
    """The strategy that a run's configuration names; ``ABSENT`` where it names none."""
    option = options.find_option(run.config, "strategy")
    return ABSENT if option is None else option.name


def _is_class(key: str) -> bool:
    return key.endswith(f".{TARGET}")


def _outermost(nodes: Any) -> list[str]:
    found: list[str] = []
    for node in sorted(nodes, key=len):
        if not any(node.startswith(f"{outer}.") for outer in found):
            found.append(node)
    return found


def _is_default(value: Any, knobs: Mapping[str, Any], knob: str) -> bool:
    return knob in knobs and bool(knobs[knob] == value)


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    # A class's import path: its last word is what tells.
    return text.rpartition(".")[2] if re.fullmatch(r"[A-Za-z_][\w.]*\.\w+", text) else text
