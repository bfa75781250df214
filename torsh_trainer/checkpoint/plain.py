"""A nested state taken apart: tensors by path, and plain values as JSON that loses nothing.

JSON has no tuples, bytes, NaN or keys other than strings. Those are written as an object with one
key that starts with ``$``; nothing in the file is code, and reading it runs none.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.errors import ConfigError

Path = tuple[str, ...]
Leaf = Tensor | FlatShard
"""What is not plain: a tensor (a DTensor included), or a piece of a flattened one."""


class SplitState(NamedTuple):
    """A nested state in two: tensors by path, and the nest of everything else."""

    tensors: dict[Path, Leaf]
    plain: dict[str, Any]


def split(state: Mapping[str, Any]) -> SplitState:
    """Takes ``state`` apart.

    Raises:
        ConfigError: a key of a dict that holds tensors is not a string.
    """
    tensors: dict[Path, Leaf] = {}
    return SplitState(tensors, _split(state, (), tensors))


def _split(state: Mapping[str, Any], at: Path, tensors: dict[Path, Leaf]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in state.items():
        path = (*at, str(key))
        before = len(tensors)
        if isinstance(value, Leaf):
            tensors[path] = value
        elif isinstance(value, Mapping):
            plain[key] = _split(value, path, tensors)
        else:
            plain[key] = value
        if len(tensors) > before and not isinstance(key, str):
            raise ConfigError(
                f"the key {key!r} of the state leads to a tensor ({dotted_name(path)}) "
                "and is no string",
                fix="use strings as keys in state_dict()",
            )
    return plain


def holds_tensors(value: Any) -> bool:
    """True when ``value`` is a tensor or a dict with one somewhere below."""
    if isinstance(value, Mapping):
        return any(holds_tensors(item) for item in value.values())
    return isinstance(value, Leaf)


def put(state: dict[str, Any], path: Path, value: Any) -> None:
    """Sets ``value`` at ``path``, making the dicts that lead there."""
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def dotted_name(path: Path) -> str:
    """``model.conv1.weight``: the name of a tensor in a checkpoint."""
    return ".".join(path)


def check_names(paths: Iterable[Path]) -> None:
    """Makes sure that dotted names tell all tensors apart.

    Raises:
        ConfigError: two paths have one dotted name.
    """
    names: set[str] = set()
    for path in paths:
        if (name := dotted_name(path)) in names:
            raise ConfigError(
                f"two tensors of the state are both called {name}",
                fix="rename a key, so that the dots in names stay unambiguous",
            )
        names.add(name)


def merge(nests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One nest of several: dicts are joined, and of two other values the first stays."""
    merged: dict[str, Any] = {}
    for nest in nests:
        for key, value in nest.items():
            held = merged.get(key)
            if isinstance(value, Mapping) and isinstance(held, Mapping):
                merged[key] = merge((held, value))
            elif key not in merged:
                merged[key] = value
    return merged


def encode(value: Any, at: Path = ()) -> Any:
    """``value`` as JSON can hold it.

    Raises:
        ConfigError: something in it is neither a tensor nor plain; the message says where.
    """
    if isinstance(value, bool | str) or value is None:
        return value
    if type(value) is int:
        return value
    if isinstance(value, float):  # numpy's float64 is one
        value = float(value)
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return _encode_mapping(value, at)
    if type(value) is list:
        return [encode(item, (*at, str(i))) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, (*at, str(i))) for i, item in enumerate(value)]}
    raise ConfigError(
        f"a checkpoint cannot hold {dotted_name(at) or 'the state'}: "
        f"it is a {type(value).__name__}",
        fix="state_dict() may give tensors, numbers, strings, bytes, None, "
        "and lists, tuples and dicts of plain values",
        at=dotted_name(at),
    )


def _encode_mapping(value: Mapping[Any, Any], at: Path) -> dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, (*at, key)) for key, item in value.items()}
    pairs = [[encode(k, at), encode(item, (*at, str(k)))] for k, item in value.items()]
    return {"$dict": pairs}


def decode(value: Any) -> Any:
    """The inverse of ``encode``."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        kind, content = next(iter(value.items()))
        if kind == "$float":
            return float(content)
        if kind == "$bytes":
            return base64.b64decode(content, validate=True)
        if kind == "$tuple":
            return tuple(decode(item) for item in content)
        if kind == "$dict":
            return {decode(key): decode(item) for key, item in content}
    return {key: decode(item) for key, item in value.items()}
