"""Knobs that have a new name. The old one works until the release named, and says so."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torsh_trainer import __version__
from torsh_trainer.errors import ConfigError


@dataclass(frozen=True)
class Renamed:
    """``new`` is the knob's name today; the old one is an error from ``removed_in`` on."""

    new: str
    removed_in: str


Table = Mapping[str, Renamed]

RENAMED: Table = {}
"""Old dotted name -> new one; see docs/configuration.md. An entry stays when its old name is gone:
it then names the new one in the error."""

_told: set[str] = set()


def today(key: str, table: Table) -> str:
    """The name of ``key`` today; warns in one line, once a process, when that is another one.

    Raises:
        ConfigError: the old name is gone.
    """
    entry = table.get(key)
    if entry is None:
        return key
    if _numbers(__version__) >= _numbers(entry.removed_in):
        raise ConfigError(f"{key} is gone", fix=f"it is called {entry.new}", name=key)
    if key not in _told:
        _told.add(key)
        print(
            f"note: {key} is now called {entry.new}; the old name goes in release "
            f"{entry.removed_in}",
            file=sys.stderr,
        )
    return entry.new


def rename_in(content: dict[str, Any], table: Table, *, package: str, path: object) -> None:
    """Gives the knobs in ``content``, the file at ``path``, today's names; in place.

    ``package`` is where the file's content goes in the configuration: ``strategy``, or empty for
    a recipe.

    Raises:
        ConfigError: the file has both names of a knob, or the new one belongs to another group.
    """
    prefix = f"{package}." if package else ""
    for old in table:
        if not old.startswith(prefix) or not _has(content, old.removeprefix(prefix)):
            continue
        new = today(old, table)
        if not new.startswith(prefix):
            raise ConfigError(
                f"{path}: {old} is now {new}, which belongs to another group",
                fix=f"take it out of this file and set {new} in a recipe",
            )
        if _has(content, new.removeprefix(prefix)):
            raise ConfigError(
                f"{path} sets {new} and, by its old name, {old}", fix=f"keep {new} alone"
            )
        _set(content, new.removeprefix(prefix), _take(content, old.removeprefix(prefix)))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _has(content: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        if not isinstance(content, dict) or part not in content:
            return False
        content = content[part]
    return True


def _take(content: dict[str, Any], dotted: str) -> Any:
    *parents, last = dotted.split(".")
    for part in parents:
        content = content[part]
    return content.pop(last)


def _set(content: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for part in parents:
        content = content.setdefault(part, {})
    content[last] = value
