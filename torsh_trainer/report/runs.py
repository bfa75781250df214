"""Run directories as values: what they logged, how they ended, what they were made of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torsh_trainer.errors import ConfigError, ResourceError, nearest

METRICS, RESULT = "metrics.jsonl", "result.json"
_CONFIG, _PROVENANCE = "config.yaml", "provenance.json"
_DEPTH = 4  # how far below a folder runs are looked for
_FACTS = frozenset({"split", "step", "epoch", "samples", "elapsed_s"})


@dataclass(frozen=True)
class Point:
    """One number of one report; ``value`` is None where it was not finite."""

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
            Point(
                row["step"],
                row.get("samples") or 0,
                row.get("elapsed_s") or 0.0,
                _finite(row[metric]),
            )
            for row in self.rows
            if row["split"] == split and metric in row
        ]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at ``paths``: run directories, or folders that hold some (a sweep's).

    Raises:
        ConfigError: there is no run at one of them.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        found = list(_folders(path))
        if not found:
            raise ConfigError(
                f"no run in {path}: neither {METRICS} nor {RESULT} is there or below it",
                fix="name a run directory, or a folder that holds some",
            )
        folders.update(dict.fromkeys(found))
    names = _names(list(folders))
    return [read_run(folder, name=name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, *, name: str) -> Run:
    """The run in ``folder``; files that are missing or broken are noted, not raised.

    Raises:
        ResourceError: a file cannot be read at all.
    """
    problems: list[str] = []
    rows = _rows(folder / METRICS, problems)
    return Run(
        name=name,
        path=folder,
        rows=rows,
        result=_json_object(folder / RESULT, problems),
        config=dict(flat(_yaml_object(folder / _CONFIG, problems))),
        provenance=_json_object(folder / _PROVENANCE, problems),
        problems=problems,
    )


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


def _files_below(path: Path, depth: int) -> Iterator[Path]:
    for entry in path.iterdir():
        if entry.name in (METRICS, RESULT):
            yield entry
        elif depth and entry.is_dir() and entry.name != "checkpoints":
            yield from _files_below(entry, depth - 1)


def _names(folders: Sequence[Path]) -> list[str]:
    """Paths without the part that all have in common."""
    parts = [folder.resolve().parts for folder in folders]
    if len(parts) == 1:
        return [parts[0][-1]]
    shared = 0
    while len({part[: shared + 1] for part in parts}) == 1:
        shared += 1
    return ["/".join(part[shared:]) or part[-1] for part in parts]


def _rows(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The reports of a metrics.jsonl; those that a resumed run made again count once."""
    rows: list[dict[str, Any]] = []
    text = _text(path)
    if not text.strip():
        problems.append(f"{path.name} is {'empty' if path.exists() else 'missing'}: no reports")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row["split"], row["step"] = str(row["split"]), int(row["step"])
        except (ValueError, KeyError, TypeError):
            problems.append(f"{path.name}, line {number}: not a report, skipped")
            continue
        if rows and rows[-1]["step"] > row["step"]:
            rows = [earlier for earlier in rows if earlier["step"] < row["step"]]
        rows = _without_twin(rows, row)
        rows.append(row)
    return rows


def _without_twin(rows: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``rows`` without the one of the same split and step, which can only be among the last."""
    for i in range(len(rows) - 1, -1, -1):
        if rows[i]["step"] != row["step"]:
            break
        if rows[i]["split"] == row["split"]:
            return rows[:i] + rows[i + 1 :]
    return rows


def _json_object(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(_text(path) or "{}")
    except ValueError as error:
        content = error
    return _object(content, path, problems)


def _yaml_object(path: Path, problems: list[str]) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is built
    try:
        content = yaml.load(_text(path) or "{}", Loader=loader)
    except yaml.YAMLError as error:
        content = error
    return _object(content, path, problems)


def _object(content: Any, path: Path, problems: list[str]) -> dict[str, Any]:
    if isinstance(content, dict):
        return content
    problems.append(f"{path.name} cannot be read: it holds no mapping")
    return {}


def _text(path: Path) -> str:
    """What a file holds; nothing when there is none."""
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


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
