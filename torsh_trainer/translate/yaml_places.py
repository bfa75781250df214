"""YAML with the place of every key and value."""

from __future__ import annotations

import yaml

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.lenient_json import DEEPEST
from torsh_trainer.translate.nodes import MappingEntry, Node, Place

_MOST_NODES = 100_000
_MOST_BY_ALIASES = 2_000
"""Aliases make a small file grow without end; no configuration comes near this."""

_MOST_BITS = 1024  # what a float can still be


def parse(text: str, *, name: str) -> Node:
    """The mapping that the one document of ``text`` holds.

    Raises:
        ConfigError: it is not YAML, holds several documents, no mapping, or a key twice.
    """
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # a character that YAML does not have
        raise _wrong(name, Place(1, 1), f"is not YAML: {error}".splitlines()[0]) from error
    try:
        root = loader.get_single_node()
        if root is None:
            return Node({}, Place(1, 1))
        check_size(root, name)
        node = _Walk(loader, name).node(root, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
        raise _wrong(name, place, f"is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:  # a date with a 13th month, a control character
        raise _wrong(name, Place(1, 1), f"is not YAML: {error}".splitlines()[0]) from error
    except RecursionError as error:
        raise _wrong(name, Place(1, 1), "is nested too deep") from error
    except (AttributeError, LookupError, TypeError) as error:  # of `!!timestamp word` and the like
        why = "is not YAML: a value is not of the type that it names"
        raise _wrong(name, Place(1, 1), why) from error
    finally:
        loader.dispose()
    if not node.is_mapping:
        raise _wrong(name, node.place, "holds no mapping")
    return node


def check_size(root: yaml.Node, name: str) -> None:
    """Refuses what aliases make too large, or has itself within itself; ``name`` is the file's.

    Raises:
        ConfigError: with the place where it goes too far.
    """
    written: set[int] = set()
    count, ahead = 0, [(root, 0)]
    while ahead:
        node, depth = ahead.pop()
        count += 1
        written.add(id(node))
        place = Place(node.start_mark.line + 1, node.start_mark.column + 1)
        if depth > DEEPEST:
            raise _wrong(name, place, "is nested too deep")
        if count > _MOST_NODES or count - len(written) > _MOST_BY_ALIASES:
            raise _wrong(name, place, "grows too large by its aliases")
        if isinstance(node, yaml.MappingNode):
            ahead += [(item, depth + 1) for pair in node.value for item in pair]
        elif isinstance(node, yaml.SequenceNode):
            ahead += [(item, depth + 1) for item in node.value]


class _Walk:
    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self.loader, self.name = loader, name

    def node(self, node: yaml.Node, depth: int) -> Node:
        place = Place(node.start_mark.line + 1, node.start_mark.column + 1)
        if isinstance(node, yaml.MappingNode):
            return Node(self.entries(node, depth), place)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.node(item, depth + 1) for item in node.value], place)
        value = self.loader.construct_object(node)
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise _wrong(self.name, place, "a number of hundreds of digits")
        return Node(value, place)

    def entries(self, node: yaml.MappingNode, depth: int) -> dict[str, MappingEntry]:
        entries: dict[str, MappingEntry] = {}
        for key_node, value_node in node.value:
            place = Place(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                raise _wrong(self.name, place, "a key that is itself a mapping or a list")
            key = str(self.loader.construct_object(key_node))
            if key in entries:
                first = entries[key].place.line
                raise _wrong(self.name, place, f"the key {key!r} stands twice, first in {first}")
            entries[key] = MappingEntry(place, self.node(value_node, depth + 1))
        return entries


def _wrong(name: str, place: Place, what: str) -> ConfigError:
    return ConfigError(
        f"{name}:{place}: {what}",
        fix="correct the file there",
        line=place.line,
        column=place.column,
    )
