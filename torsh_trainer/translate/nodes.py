"""Values with their places: what a configuration file says, and where it says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where in a file, both counted from 1; 0 where there is no file (a dict in memory)."""

    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.line}:{self.column}" if self.line else "in memory"


@dataclass(frozen=True)
class Node:
    """One value. ``value`` is a scalar, a list of nodes, or a mapping of key -> ``MappingEntry``.

    ``bare`` is true for a text that stood without quotes, as a placeholder of a template does.
    """

    value: Any
    place: Place = Place()
    bare: bool = False

    @property
    def is_mapping(self) -> bool:
        """It has keys."""
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        """It has items."""
        return isinstance(self.value, list)

    def plain(self) -> Any:
        """The same as Python's own dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: entry.node.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


@dataclass(frozen=True)
class MappingEntry:
    """A key of a mapping: its own place, and its value."""

    place: Place
    node: Node


def node_of(value: Any, place: Place = Place()) -> Node:
    """``value`` (dicts, lists, scalars) as nodes that all stand at ``place``."""
    if isinstance(value, Mapping):
        entries = {
            str(key): MappingEntry(place, node_of(item, place)) for key, item in value.items()
        }
        return Node(entries, place)
    if isinstance(value, list | tuple):
        return Node([node_of(item, place) for item in value], place)
    return Node(value, place)


def leaves(
    node: Node, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], MappingEntry]]:
    """Every key that holds no further keys: (path, entry); an empty mapping is a leaf itself."""
    for key, entry in node.value.items():
        if entry.node.is_mapping and entry.node.value:
            yield from leaves(entry.node, (*path, key))
        else:
            yield (*path, key), entry
