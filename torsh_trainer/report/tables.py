"""What a report says of results: a row for each run, and which is the best."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torsh_trainer.report.differences import strategy_of
from torsh_trainer.report.options import OptionCatalog
from torsh_trainer.report.runs import Run

_HIGHER = frozenset(
    ("acc", "accuracy", "auc", "bleu", "f1", "iou", "map", "precision", "r2", "recall", "score")
)
_LOWER = frozenset(("cer", "error", "loss", "mae", "mse", "perplexity", "ppl", "rmse", "wer"))
_LONG_MAPPING = 12
_TRAIN_LOSS = "train loss"


@dataclass(frozen=True)
class Cell:
    """``text`` as shown; ``number`` says that it is one; ``best`` that no run shows a better."""

    text: str
    number: bool = False
    best: bool = False


@dataclass(frozen=True)
class Ranking:
    """Which runs, by their numbers, are best in ``column`` of the results, and what says so.

    ``better`` is 1 where higher is better, -1 where lower is; ``reason`` names the knob.
    """

    column: str
    better: int
    reason: str
    best: tuple[int, ...]


def ranking(runs: Sequence[Run]) -> Ranking | None:
    """The best among runs that are done, by ``trainer.objective`` and its mode.

    Where runs differ in it or have none it is the training loss, as in a sweep. Values that are
    shown alike are equal. None where fewer than two runs can be compared.
    """
    done = [run for run in runs if run.state == "done"]
    asked = [
        (run.config.get("trainer.objective"), run.config.get("trainer.objective_mode"))
        for run in done
    ]
    if len(done) < 2:
        return None
    (objective, mode), reason = (None, None), "runs differ in trainer.objective"
    if all(one == asked[0] for one in asked):
        objective, mode = asked[0]
        reason = "trainer.objective" if objective else "no trainer.objective"
    columns = [name for run in done for name in final_metrics(run)]
    column = next((c for c in _columns_of(objective) if c in columns), _TRAIN_LOSS)
    better = 1 if column != _TRAIN_LOSS and mode == "max" else -1
    if objective is not None and column == _TRAIN_LOSS:
        reason = f"trainer.objective={objective} was not logged"
    best = _best(runs, [_number_in(run, column) for run in runs], better=better)
    return None if best is None else Ranking(column, better, reason, best)


def results(
    runs: Sequence[Run], options: OptionCatalog, ranked: Ranking | None = None
) -> tuple[list[str], list[list[Cell]]]:
    """(column names, a row of cells for each run); columns that no run fills are left out."""
    metrics = list(dict.fromkeys(name for run in runs for name in final_metrics(run)))
    columns: dict[str, list[Cell]] = {
        "state": [Cell(run.state) for run in runs],
        "strategy": [
            Cell(str(run.result.get("strategy") or strategy_of(run, options))) for run in runs
        ],
        "processes": _numbers([run.result.get("world_size") for run in runs]),
        "steps": _numbers([run.result.get("steps", _last_step(run)) for run in runs]),
        "reports": _numbers([len(run.rows) for run in runs]),
    }
    for name in (_TRAIN_LOSS, *metrics):
        judged = ranked is not None and name == ranked.column
        better = ranked.better if ranked is not None and judged else direction(name)
        columns[name] = _mark_best(runs, [_number_in(run, name) for run in runs], better=better)
    columns |= {
        "throughput": [Cell(_speed(run), number=True) for run in runs],
        "wall time": [Cell(_clock(run.result.get("wall_s")), number=True) for run in runs],
        "peak memory": [Cell(_bytes(run.result.get("peak_memory_bytes")), True) for run in runs],
    }
    filled = {name: cells for name, cells in columns.items() if any(c.text for c in cells)}
    return list(filled), [list(row) for row in zip(*filled.values(), strict=True)]


def final_metrics(run: Run) -> dict[str, float | None]:
    """``eval accuracy``, ``test loss``, ...: the last evaluation's numbers of each split."""
    found: dict[str, float | None] = {}
    for split in ("eval", "test"):
        for metric in run.metrics(split):
            if metric != "wall_s":
                found[f"{split} {metric}"] = run.curve(split, metric)[-1].value
    return found


def direction(metric: str) -> int:
    """1 where higher is better, -1 where lower is, 0 where the name does not tell."""
    words = set(re.split(r"[\W_]+", metric.lower()))
    if words & _HIGHER:
        return 1
    return -1 if words & _LOWER else 0


def number(value: float | None) -> str:
    """Five significant digits, thousands separated."""
    if value is None:
        return ""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"


def _numbers(values: Sequence[Any]) -> list[Cell]:
    return [Cell(number(value), number=True) for value in values]


def _mark_best(runs: Sequence[Run], values: Sequence[float | None], *, better: int) -> list[Cell]:
    """Numbers with the best marked, among runs that are done and where they differ."""
    cells = _numbers(values)
    best = _best(runs, values, better=better) if better else None
    if best is None or len(best) == sum(run.state == "done" for run in runs):
        return cells
    return [replace(cell, best=i in best) for i, cell in enumerate(cells)]


def _best(
    runs: Sequence[Run], values: Sequence[float | None], *, better: int
) -> tuple[int, ...] | None:
    """The runs with the best of ``values`` as it is shown; None with fewer than two to compare."""
    judged = {
        i: value
        for i, (run, value) in enumerate(zip(runs, values, strict=True))
        if value is not None and run.state == "done"
    }
    if len(judged) < 2:
        return None
    shown = number(max(judged.values(), key=lambda value: better * value))
    return tuple(i for i, value in judged.items() if number(value) == shown)


def _number_in(run: Run, column: str) -> float | None:
    return _train_loss(run) if column == _TRAIN_LOSS else final_metrics(run).get(column)


def _columns_of(objective: object) -> list[str]:
    """Where a metric of a run's result stands in the table: its tests' are called test_NAME."""
    name = str(objective)
    test = [f"test {name.removeprefix('test_')}"] if name.startswith("test_") else []
    return [] if objective is None else [f"eval {name}", *test]


def _train_loss(run: Run) -> float | None:
    losses = run.curve("train", "loss")
    final = run.result.get("train_loss")
    return final if final is not None or not losses else losses[-1].value


def _last_step(run: Run) -> int | None:
    return run.rows[-1]["step"] if run.rows else None


def _speed(run: Run) -> str:
    """The run's mean, in units of its own (tokens) where it has some."""
    samples_per_s = run.result.get("samples_per_s")
    if not samples_per_s:
        return ""
    for name in run.metrics("train"):
        own = name.endswith("_per_s") and name != "samples_per_s"
        for row in reversed(run.rows) if own else ():
            if row.get(name) and row.get("samples_per_s"):
                rate = samples_per_s * row[name] / row["samples_per_s"]
                return f"{number(_round_rate(rate))} {name.removesuffix('_per_s')}/s"
    return f"{number(_round_rate(samples_per_s))} samples/s"


def _round_rate(rate: float) -> float:
    return round(rate) if rate >= 100 else float(f"{rate:.3g}")


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _bytes(count: float | None) -> str:
    if not count:
        return ""
    mib = count / 2**20
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib:.3g} MiB"


def fact_texts(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, text) for a table of facts; a long mapping (packages) stays one text."""
    facts: list[tuple[str, str]] = []
    for key, value in content.items():
        if isinstance(value, Mapping) and 0 < len(value) <= _LONG_MAPPING:
            facts += fact_texts(value, f"{prefix}{key}.")
        elif isinstance(value, Mapping):
            facts.append((f"{prefix}{key}", "\n".join(f"{k} {v}" for k, v in value.items())))
        elif isinstance(value, list):
            facts.append((f"{prefix}{key}", " ".join(map(str, value))))
        else:
            facts.append((f"{prefix}{key}", str(value)))
    return facts
