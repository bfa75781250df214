"""Nodes with a class of one's own: who gives a ``_target_`` begins with the group's knobs alone.

Otherwise the class would be handed what an option that was chosen before has filled in for
another. An option that is chosen in the same place, by the same hand, stays: then the class is
meant as a variant of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.utils.registry import GROUPS

TARGET = "_target_"
ONE_CLASS = ("task", "model", "data", "strategy")
"""Groups whose options name different classes, each with knobs of its own."""

LISTENERS = ("callbacks", "logger")
"""Groups of several nodes, each of which can be switched off."""


def complete_node(content: dict[str, Any], *, package: str, path: Path) -> dict[str, Any]:
    """A recipe or an option file, with what goes with the classes that it names.

    ``package`` is where it stands in the configuration, empty for a recipe; ``path`` is for
    messages.

    Raises:
        ConfigError: its defaults are no list.
    """
    defaults = content.get("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(
            f"{path}: defaults is {defaults!r}, and no list",
            fix="write one entry a line, such as `- override /optimizer: adamw`",
        )
    held = content if package == "" else {package: content}
    for group in LISTENERS:
        for node in _nodes(held.get(group)):
            node.setdefault("enabled", True)
    if package:
        return content
    chosen = {_group_of(key) for entry in defaults if isinstance(entry, dict) for key in entry}
    unset = [
        {f"override /{group}": None}
        for group in ONE_CLASS
        if _names_a_class(content.get(group)) and group not in chosen
    ]
    return {**content, "defaults": [*defaults, *unset]} if unset else content


def places(overrides: Iterable[tuple[str, Any]]) -> set[str]:
    """The places for which a command line, given as (key, value), names a class."""
    found = {key.removesuffix(f".{TARGET}") for key, _ in overrides if key.endswith(f".{TARGET}")}
    found |= {key for key, value in overrides if _names_a_class(value)}
    return {place for place in found if place.partition(".")[0] in GROUPS}


def remove_replaced(placed: set[str], chosen: set[str]) -> list[str]:
    """Overrides that take away the options in whose stead a command line names classes."""
    return [f"~{group}" for group in ONE_CLASS if group in placed and group not in chosen]


def within(key: str, placed: set[str]) -> bool:
    """Whether ``key`` is one of the places, or lies in one."""
    return any(key == place or key.startswith(f"{place}.") for place in placed)


def _nodes(held: Any) -> list[dict[str, Any]]:
    nodes = held.values() if isinstance(held, dict) else ()
    return [node for node in nodes if _names_a_class(node)]


def _names_a_class(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get(TARGET), str)


def _group_of(key: Any) -> str:
    """``data`` for the keys ``override /data`` and ``/data@mine`` of a defaults list."""
    return str(key).removeprefix("override ").strip().lstrip("/").partition("@")[0]
