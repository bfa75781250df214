"""What a report says in tables: results of each run, and where configurations differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torsh_trainer.report.runs import Run

ABSENT = "—"
_OWN_TO_A_RUN = ("run_dir", "hydra", "launcher.log_dir")  # differ always, and say nothing
_HIGHER = frozenset(
    ("acc", "accuracy", "auc", "bleu", "f1", "iou", "map", "precision", "r2", "recall", "score")
)
_LOWER = frozenset(("cer", "error", "loss", "mae", "mse", "perplexity", "ppl", "rmse", "wer"))
_HINT_KEYS = 3
_LONG_MAPPING = 12


@dataclass(frozen=True)
class Cell:
    """``text`` as shown; ``number`` says that it is one; ``best`` that no other run beats it."""

    text: str
    number: bool = False
    best: bool = False


def results(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]]]:
    """(column names, a row of cells for each run); columns that no run fills are left out."""
    metrics = list(dict.fromkeys(name for run in runs for name in final_metrics(run)))
    columns: dict[str, list[Cell]] = {
        "state": [Cell(run.state) for run in runs],
        "strategy": [Cell(str(run.result.get("strategy", ""))) for run in runs],
        "processes": _numbers([run.result.get("world_size") for run in runs]),
        "steps": _numbers([run.result.get("steps", _last_step(run)) for run in runs]),
        "reports": _numbers([len(run.rows) for run in runs]),
        "train loss": _judged(runs, [_train_loss(run) for run in runs], better=-1),
    }
    for name in metrics:
        values = [final_metrics(run).get(name) for run in runs]
        columns[name] = _judged(runs, values, better=direction(name))
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


def differences(runs: Sequence[Run]) -> tuple[dict[str, list[Any]], int]:
    """Configuration keys that differ between ``runs`` with their values, and how many agree.

    A run without the key has ``ABSENT`` there.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing: dict[str, list[Any]] = {}
    agreeing = 0
    for key in keys:
        if key.startswith(_OWN_TO_A_RUN):
            continue
        values = [run.config.get(key, ABSENT) for run in runs]
        if any(str(value) != str(values[0]) for value in values):
            differing[key] = values
        else:
            agreeing += 1
    return differing, agreeing


def hints(runs: Sequence[Run]) -> list[str]:
    """A few words on what sets each run apart: ``lr=0.01 strategy=fsdp``; or nothing."""
    differing, _ = differences(runs)
    # `strategy._target_` and the knobs that come with it say one thing: the strategy.
    classes = {key.removesuffix("._target_"): key for key in differing if key.endswith("_target_")}
    keys = {
        key: values
        for key, values in differing.items()
        if key in classes.values() or key.rpartition(".")[0] not in classes
    }
    if not 0 < len(keys) <= _HINT_KEYS:
        return ["" for _ in runs]
    return [
        " ".join(
            f"{_word(key)}={_value(values[i])}"
            for key, values in keys.items()
            if values[i] != ABSENT
        )
        for i in range(len(runs))
    ]


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


def _judged(runs: Sequence[Run], values: Sequence[float | None], *, better: int) -> list[Cell]:
    """Numbers with the best marked, among runs that are done and where they differ."""
    cells = _numbers(values)
    judged = {
        i: better * value
        for i, (run, value) in enumerate(zip(runs, values, strict=True))
        if value is not None and run.state == "done"
    }
    if not better or len(set(judged.values())) < 2:
        return cells
    best = max(judged.values())
    return [replace(cell, best=judged.get(i) == best) for i, cell in enumerate(cells)]


def _word(key: str) -> str:
    parts = key.removesuffix("._target_").split(".")
    return parts[-1]


def _value(value: Any) -> str:
    text = "null" if value is None else str(value)
    # A class's import path: its last word is what tells.
    return text.rpartition(".")[2] if re.fullmatch(r"[A-Za-z_][\w.]*\.\w+", text) else text


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
                return f"{number(_rounded(rate))} {name.removesuffix('_per_s')}/s"
    return f"{number(_rounded(samples_per_s))} samples/s"


def _rounded(rate: float) -> float:
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
