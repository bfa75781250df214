"""Figures of what was drawn and tried, kept in a file for the page of guarantees."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class FuzzRecord:
    """All ranges of a file together; ``wrong`` tells every combination that differed or crashed."""

    torch: str
    verdicts: Mapping[str, int]
    wrong: Sequence[str]

    @property
    def combinations(self) -> int:
        """How many were tried."""
        return sum(self.verdicts.values())


def write_range(
    file: Path, first: int, combinations: int, verdicts: Mapping[str, int], wrong: Sequence[str]
) -> None:
    """Adds the figures of a range of numbers; one tried again replaces its own.

    Raises:
        ValueError: it overlaps another range: numbers would count twice.
    """
    kept: dict[str, Any] = _read(file) if file.is_file() else {"ranges": []}
    ranges = [
        one
        for one in kept["ranges"]
        if (one["first"], one["combinations"]) != (first, combinations)
    ]
    for one in ranges:
        if one["first"] < first + combinations and first < one["first"] + one["combinations"]:
            raise ValueError(
                f"{file} has figures from {one['first']} on already: take another range or file"
            )
    added = {
        "first": first,
        "combinations": combinations,
        "verdicts": dict(verdicts),
        "wrong": list(wrong),
    }
    kept = {
        "torch": torch.__version__.split("+")[0],
        "ranges": sorted([*ranges, added], key=lambda one: int(one["first"])),
    }
    file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_record(file: Path) -> FuzzRecord | None:
    """What a file keeps, or None where there is none."""
    if not file.is_file():
        return None
    kept = _read(file)
    verdicts: Counter[str] = Counter()
    for one in kept["ranges"]:
        verdicts.update(one["verdicts"])
    wrong = [line for one in kept["ranges"] for line in one["wrong"]]
    return FuzzRecord(kept["torch"], dict(verdicts.most_common()), wrong)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
