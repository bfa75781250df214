"""Run directories as values: what they logged, how they ended, what they were made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError, nearest
from torsh_trainer.utils.files import DEEPEST, not_plain, parse_yaml
from torsh_trainer.utils.masking import mask_override, mask_tree

METRICS, RESULT = "metrics.jsonl", "result.json"
_CONFIG, _PROVENANCE = "config.yaml", "provenance.json"
_DEPTH = 4  # how far below a folder runs are looked for
_FACTS = frozenset({"split", "step", "epoch", "samples", "elapsed_s"})
_NUMBERS = frozenset(
    (
        "world_size",
        "steps",
        "samples",
        "train_loss",
        "wall_s",
        "samples_per_s",
        "peak_memory_bytes",
    )
)
"""What result.json holds as numbers."""

_LARGEST = 1e60
"""A number beyond it, like one that is not finite, is a gap: no axis can hold it."""

_MOST_STEPS = 2**53
_MOST_PROBLEMS = 20
_MOST_BITS = 10_000


@dataclass(frozen=True)
class Point:
    """One number of one report; ``value`` is None where it was not finite, or beyond 1e60."""

    step: int
    samples: int
    elapsed_s: float
    value: float | None


@dataclass(frozen=True)
class Run:
    """What one run directory says. ``config`` is flat: ``optimizer.lr`` -> 0.001.

    ``problems`` are sentences about what could not be read; nothing else of the run is lost.
    """

    name: str
    path: Path
    rows: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    problems: Sequence[str] = ()

    @property
    def state(self) -> str:
        """``done``, ``failed``, ``interrupted``, or ``unfinished`` where no result was left."""
        if not self.result:
            return "unfinished"
        error = self.result.get("error")
        if isinstance(error, dict) and error.get("type") == "Interrupted":
            return "interrupted"
        return "failed" if error else "done"

    def metrics(self, split: str) -> list[str]:
        """Names of the numbers that reports of ``split`` hold, in the order of appearance."""
        names = {
            name: None
            for row in self.rows
            if row["split"] == split
            for name, value in row.items()
            if name not in _FACTS and _is_number(value)
        }
        return list(names)

    def curve(self, split: str, metric: str) -> list[Point]:
        """``metric`` over the reports of ``split`` that hold it."""
        return [
            Point(row["step"], row.get("samples") or 0, row.get("elapsed_s") or 0.0, row[metric])
            for row in self.rows
            if row["split"] == split and metric in row
        ]


_BESIDE = ("multirun.yaml", "sweep.csv", "optimization_results.yaml")
"""Files of a sweep, which lie beside its runs."""


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at ``paths``: run directories, or folders that hold some (a sweep's).

    Raises:
        ConfigError: there is no run at one of them.
    """
    folders: dict[Path, Path] = {}  # one place may be named twice, or by a link
    for path in paths:
        if path.name in _BESIDE and path.is_file() and len(paths) > 1:
            continue  # runs/sweeps/TIME/* names it, too
        found = list(_folders(path))
        if not found:
            raise ConfigError(
                f"no run in {path}: neither {METRICS} nor {RESULT} is there or below it",
                fix="name a run directory, or a folder that holds some",
            )
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    names = _names(list(folders))
    places = folders.values()
    return [read_run(folder, name=name) for folder, name in zip(places, names, strict=True)]


def read_run(folder: Path, *, name: str) -> Run:
    """The run in ``folder``; files that are missing or broken are noted, not raised.

    Raises:
        ResourceError: a file cannot be read at all.
    """
    problems: list[str] = []
    run = Run(
        name=name,
        path=folder,
        rows=_rows(folder / METRICS, problems),
        result=_result(folder / RESULT, problems),
        config=dict(flat(mask_tree(_object(folder / _CONFIG, parse_yaml, problems)))),
        provenance=_provenance(folder / _PROVENANCE, problems),
    )
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"and {len(problems) - _MOST_PROBLEMS:,} more like these"]
    return replace(run, problems=problems)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested mapping as dotted keys and values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _folders(path: Path) -> Iterator[Path]:
    if path.is_file() and path.name in (METRICS, RESULT):
        path = path.parent
    if path.is_file():
        raise ConfigError(
            f"{path} is a file, and a run is a folder",
            fix="name the run directory, or a folder that holds some (a sweep's)",
        )
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"no such run directory: {path}",
            fix=nearest(path.name, siblings) if len(siblings) < 20 else "check the path",
        )
    if (path / METRICS).exists() or (path / RESULT).exists():
        yield path
        return
    # Sorted as people count: job 10 of a sweep comes after job 9.
    below = {file.parent for file in _files_below(path, _DEPTH)}
    yield from sorted(
        below, key=lambda p: [(len(s), s) if s.isdigit() else (0, s) for s in p.parts]
    )


def _files_below(path: Path, depth: int, seen: frozenset[Path] = frozenset()) -> Iterator[Path]:
    seen |= {path.resolve()}
    for entry in path.iterdir():
        if entry.name in (METRICS, RESULT):
            yield entry
        elif not depth or not entry.is_dir() or entry.name == "checkpoints":
            continue
        elif entry.resolve() not in seen:  # a link to a folder above leads round in circles
            yield from _files_below(entry, depth - 1, seen)


def _names(folders: Sequence[Path]) -> list[str]:
    """Different paths, without the part that all have in common."""
    parts = [folder.parts for folder in folders]
    if len(parts) == 1:
        return [parts[0][-1]]
    shared = 0
    while len({part[: shared + 1] for part in parts}) == 1:
        shared += 1
    return ["/".join(part[shared:]) or part[-1] for part in parts]


def _rows(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The reports of a metrics.jsonl; those that a resumed run made again count once."""
    rows: list[dict[str, Any]] = []
    text = _text(path, problems)
    if not text.strip():
        problems.append(f"{path.name} is {'empty' if path.exists() else 'missing'}: no reports")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row, left_out = _report(json.loads(line))
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            problems.append(f"{path.name}, line {number}: not a report, skipped")
            continue
        if left_out:
            problems.append(f"{path.name}, line {number}: {left_out} is no number, left out")
        _make_room(rows, row)
        rows.append(row)
    return rows


def _report(said: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A line of metrics.jsonl with numbers for values, and the names of those that are none."""
    step = int(said["step"])
    if abs(step) > _MOST_STEPS:
        raise ValueError(step)
    row: dict[str, Any] = {"split": str(said["split"]), "step": step}
    left_out = []
    for name, value in said.items():
        if name in row:
            continue
        if _is_number(value):
            row[name] = _drawable(value)
        else:
            left_out.append(name[:40])
    return row, ", ".join(left_out[:3])


def _make_room(rows: list[dict[str, Any]], row: Mapping[str, Any]) -> None:
    """Takes out of ``rows``, whose steps never fall, what ``row`` begins again or repeats."""
    if rows and rows[-1]["step"] > row["step"]:
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
    for i in range(len(rows) - 1, -1, -1):
        if rows[i]["step"] != row["step"]:
            break
        if rows[i]["split"] == row["split"]:
            del rows[i]
            break


def _result(path: Path, problems: list[str]) -> dict[str, Any]:
    content = _object(path, json.loads, problems)
    for name in _NUMBERS & content.keys():
        value = content[name]
        content[name] = _drawable(value) if _is_number(value) else None
        if value is not None and content[name] is None:
            problems.append(f"{path.name}: {name} is no number that can be shown, left out")
    return content


def _provenance(path: Path, problems: list[str]) -> dict[str, Any]:
    content = _object(path, json.loads, problems)
    command = content.get("command")
    if isinstance(command, list):  # of a run from before secrets were masked as it is written
        content["command"] = [mask_override(str(word)) for word in command]
    return content


def _object(path: Path, parse: Callable[[str], Any], problems: list[str]) -> dict[str, Any]:
    """The mapping that a file holds; an empty one, and a problem, where it holds none."""
    try:
        content = parse(_text(path, problems) or "{}")
        if not isinstance(content, dict):
            raise ValueError("it holds no mapping")
        _check_extent(content)
    except (ValueError, RecursionError) as error:
        why = str(error) if str(error).startswith("it ") else "it holds no mapping"
        problems.append(f"{path.name} cannot be read: {why}")
        return {}
    return content


def _check_extent(content: Any) -> None:
    """Refuses what would exhaust whoever walks over it or writes it out as text."""
    level = [content]
    for _ in range(DEEPEST):
        found: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                found += value.values()
            elif isinstance(value, list | tuple):
                found += value
            elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise ValueError("it holds a number of thousands of digits")
        level = found
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _text(path: Path, problems: list[str]) -> str:
    """What a file holds; nothing when there is none."""
    kind = not_plain(path)
    if kind is not None:
        problems.append(f"{path.name} is {kind}")
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ResourceError(
            f"cannot read {path}: {error.strerror}", fix="check its permissions"
        ) from error


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _drawable(value: float | None) -> float | None:
    """``value`` where an axis can hold it; next to 0 is 0, whose logarithm nobody takes."""
    if value is None or not abs(value) <= _LARGEST:
        return None
    return value if abs(value) >= 1 / _LARGEST else 0
