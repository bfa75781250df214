"""Values that only the process which Hydra runs can tell: ``${hydra:...}`` and ``${now:...}``.

Where a cluster starts the processes, each composes for itself, and one alone is Hydra's
application, with a directory and a moment of its own. What these two say is taken from it: until
the processes have met, a mark stands where it belongs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

ASKS = re.compile(r"\$\{\s*(hydra|now)\s*:")


def answers(config: DictConfig) -> dict[str, Any]:
    """What is asked in ``config``, by its place, resolved."""
    return {name: _plain(parent[key]) for name, parent, key in _asking(config)}


def put_marks(config: DictConfig) -> dict[str, Any]:
    """Puts a mark wherever ``config`` asks; the marks, by place."""
    marks = {}
    for name, parent, key in list(_asking(config)):
        marks[name] = parent[key] = f"\0{name}\0"
    return marks


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _asking(node: DictConfig | ListConfig, *above: str) -> Iterator[tuple[str, Any, Any]]:
    """(place in words, what holds it, under which key) of every value that asks."""
    held = OmegaConf.to_container(node, resolve=False, throw_on_missing=False)
    keys: Any = range(len(held)) if isinstance(held, list) else held
    for key in list(keys):
        value = held[key]  # type: ignore[index]
        if isinstance(value, str):
            if ASKS.search(value):
                yield ".".join([*above, str(key)]), node, key
        elif isinstance(value, dict | list):
            yield from _asking(node[key], *above, str(key))
