"""(e) Saving and loading checkpoints, in one process and in two."""

from __future__ import annotations

from typing import Any

from benchmarks import checkpoint_ranks, checkpoint_save
from benchmarks.work import table

TITLE = "saving and loading checkpoints"


def measure(*, quick: bool, device: str) -> dict[str, Any]:
    """Rows for the ways of saving, and for strategies on two processes; on CPUs."""
    small: dict[str, Any] = {"size": "3M", "saves": 3} if quick else {}
    return {"ways": checkpoint_save.measure(**small), "ranks": checkpoint_ranks.measure(**small)}


def text(found: dict[str, Any]) -> str:
    """Both tables, in Markdown, each with its note."""
    ways, ranks = found["ways"], found["ranks"]
    return "\n\n".join(
        [
            "### (e) Saving and loading checkpoints",
            table(checkpoint_save.HEAD, [checkpoint_save.cells(row) for row in ways]),
            checkpoint_save.note(ways),
            table(checkpoint_ranks.HEAD, [checkpoint_ranks.cells(row) for row in ranks]),
            checkpoint_ranks.note(ranks),
        ]
    )
