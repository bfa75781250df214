"""How a checkpoint of an older format is read as one of today's; files are never rewritten.

Each step leads from one version to the next, first for the manifest, then for the state. It works
on what was decoded and changes it in place. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VERSION = 2
"""Of what is written today."""

Change = Callable[[dict[str, Any]], None]


def _nothing(_: dict[str, Any]) -> None:
    """For what has stayed the same."""


@dataclass(frozen=True)
class Migration:
    """From a version to the next: ``manifest`` changes a decoded manifest, ``state`` a state.

    A state may come with its tensors or without them, and in part only; what is not there stays
    away.
    """

    manifest: Change = _nothing
    state: Change = _nothing


def _state_1_to_2(state: dict[str, Any]) -> None:
    """Version 1 had one random stream for each rank, as a tensor, and less to say about a run."""
    for name in ("config", "setup", "loop", "feed"):
        state.setdefault(name, {})
    streams = state.get("rng", {})
    for rank, stream in streams.items():
        if not isinstance(stream, dict):
            streams[rank] = {"torch": stream}


MIGRATIONS: dict[int, Migration] = {1: Migration(state=_state_1_to_2)}
"""By the version that they start from."""


def migrate_manifest(content: dict[str, Any], version: int) -> None:
    """Makes a manifest of ``version`` one of today's, in place."""
    for step in range(version, VERSION):
        MIGRATIONS[step].manifest(content)


def migrate_state(state: dict[str, Any], version: int) -> None:
    """Makes a state of ``version`` one of today's, in place."""
    for step in range(version, VERSION):
        MIGRATIONS[step].state(state)
