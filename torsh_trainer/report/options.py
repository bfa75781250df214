"""What the options of the configuration are called, and the knobs that come with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torsh_trainer.report.runs import flat

TARGET = "_target_"


@dataclass(frozen=True)
class Option:
    """One option: its name (``fsdp``) and its knobs as they are unless set, dotted."""

    name: str
    knobs: Mapping[str, Any]


class OptionCatalog:
    """The options in folders of config groups (``GROUP/OPTION.yaml``), read when asked for.

    A file that cannot be read offers nothing: what is not known is shown in full.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders = folders
        self._groups: dict[str, dict[str, Mapping[str, Any]]] = {}

    def find_option(self, config: Mapping[str, Any], node: str) -> Option | None:
        """The option behind ``node`` (``strategy``, ``callbacks.csv``) of a flat ``config``.

        Of options with one class the one that most knobs agree with; a class that no option has
        gives its own name, and no knobs. None where the node names no class.
        """
        target = config.get(f"{node}.{TARGET}")
        if not isinstance(target, str):
            return None
        set_here = knobs_of(config, node)
        known = list(self._with_class(node, target))
        if not known:
            return Option(target.rpartition(".")[2], {})
        return max(known, key=lambda o: sum(set_here.get(k) == v for k, v in o.knobs.items()))

    def _with_class(self, node: str, target: str) -> Iterator[Option]:
        group, _, inner = node.partition(".")
        for name, content in self._group(group).items():
            if content.get(f"{inner}.{TARGET}" if inner else TARGET) == target:
                called = target.rpartition(".")[2] if inner else name
                yield Option(called, knobs_of(content, inner) if inner else _without_class(content))

    def _group(self, group: str) -> dict[str, Mapping[str, Any]]:
        """Option -> its flat content, where the first folder that has it serves it."""
        if group not in self._groups:
            found: dict[str, Mapping[str, Any]] = {}
            for folder in self._folders:
                for path in sorted((folder / group).glob("*.yaml")):
                    found.setdefault(path.stem, dict(flat(_content(path, seen=()))))
            self._groups[group] = found
        return self._groups[group]


def knobs_of(config: Mapping[str, Any], node: str) -> dict[str, Any]:
    """What a flat ``config`` holds below ``node``, but for the class."""
    below = f"{node}."
    inner = {key.removeprefix(below): v for key, v in config.items() if key.startswith(below)}
    return _without_class(inner)


def _without_class(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != TARGET}


def _content(path: Path, *, seen: Sequence[Path]) -> dict[str, Any]:
    """A file over those of its folder that its ``defaults`` name."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        own = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, ValueError, yaml.YAMLError):
        own = None
    if not isinstance(own, dict) or path in seen:
        return {}
    bases = own.pop("defaults", None)
    merged: dict[str, Any] = {}
    for base in bases if isinstance(bases, list) else ():
        if isinstance(base, str) and base != "_self_":
            merged |= _content(path.with_name(f"{base}.yaml"), seen=(*seen, path))
    return merged | own
