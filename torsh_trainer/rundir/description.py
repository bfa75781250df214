"""What objects were made of, as config.yaml can hold it."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

MOST_ITEMS = 100
"""A longer list, of labels say, is data: its length is written."""

_MOST_DEPTH = 6
_TARGET = "_target_"


def describe(value: Any, *, depth: int = _MOST_DEPTH) -> Any:
    """``value`` as plain values; an object as ``_target_``, its class, and its arguments.

    The arguments are the fields of a dataclass, and what another object keeps under the name of an
    argument of its constructor; what it keeps under no such name is left out. A class or a function
    is its name. Nothing is called and nothing is computed: a property stays unread.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str | os.PathLike):
        return str(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return _describe_items(value, depth)
    if isinstance(value, partial):
        node = {_TARGET: name_of(value.func), "_partial_": True}
        return {**node, **_describe_items(value.keywords, depth)}
    if isinstance(value, type) or inspect.isroutine(value):
        return name_of(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    arguments = {} if depth == 0 else arguments_of(value)
    return {_TARGET: name_of(type(value)), **_describe_items(arguments, depth)}


def arguments_of(value: Any) -> dict[str, Any]:
    """What ``value`` keeps under the names of its constructor's arguments."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    try:
        names = list(inspect.signature(type(value)).parameters)
    except (TypeError, ValueError):  # written in C, without a signature
        return {}
    kept = getattr(value, "__dict__", {})
    return {name: kept[name] for name in names if name in kept}


def name_of(value: Any) -> str:
    """The import path of a class or function; one of a script is in ``__main__``."""
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', None) or type(value).__module__}.{name}"


def _describe_items(
    value: Mapping[Any, Any] | Sequence[Any] | set[Any] | frozenset[Any], depth: int
) -> Any:
    if len(value) > MOST_ITEMS or (value and depth == 0):
        return f"{type(value).__name__} of {len(value)} items"
    if isinstance(value, Mapping):
        return {str(key): describe(item, depth=depth - 1) for key, item in value.items()}
    return [describe(item, depth=depth - 1) for item in value]
