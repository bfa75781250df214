"""Plain values held against the annotations of whoever takes them."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union

from torsh_trainer.errors import ConfigError, nearest

Nested = Callable[[type, Mapping[str, Any], str], Any]
"""Makes a dataclass of a mapping: ``(dataclass, mapping, dotted key) -> its stand-in``."""

_UNIONS = (Union, types.UnionType)
_LISTS = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
    collections.abc.Set: set,
}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
    dict: "a mapping",
}


_NOTHING = (None, inspect.Parameter.empty)


class _Unfit(Exception):
    """The value does not fit; only its caller knows the whole of what was wanted."""


def as_it_is(kind: type, value: Mapping[str, Any], key: str) -> Any:
    """Leaves a mapping a mapping, where no dataclass can be wanted."""
    return value


def fit_value(
    value: Any, wanted: Any, *, key: str, default: Any = None, nested: Nested = as_it_is
) -> Any:
    """``value`` as ``wanted`` (an annotation) asks for it: 3.0 becomes 3, a list a tuple.

    Annotations that say nothing about plain values (``nn.Module``, a type variable, none at all)
    take everything. ``default`` is offered in the message.

    Raises:
        ConfigError: the value is of another type; names ``key``.
    """
    try:
        return _fit(value, wanted, key, nested)
    except _Unfit:
        fix = _advice(value, wanted, key, default)
        raise ConfigError(
            f"{key}: expected {words(wanted)}, got {as_yaml(value)}", fix=fix, key=key
        ) from None


def check_finite(value: Any, *, key: str, default: Any) -> None:
    """Refuses infinity and NaN, however deep, where ``default`` is not such a number itself.

    Raises:
        ConfigError: names ``key``.
    """
    if isinstance(value, float) and not math.isfinite(value):
        if isinstance(default, float) and not math.isfinite(default):
            return
        fix = "give a number" if default in _NOTHING else f"the default is {as_yaml(default)}"
        raise ConfigError(f"{key}={value} is not a finite number", fix=fix, key=key)
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_finite(item, key=f"{key}[{i}]", default=None)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            check_finite(item, key=f"{key}.{name}", default=None)


def words(wanted: Any) -> str:
    """What an annotation asks for, in words."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in _UNIONS:
        parts = sorted((words(part) for part in arguments), key=lambda text: text == "null")
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in _LISTS or wanted in _LISTS:
        inner = [part for part in arguments if part is not ...]
        if not inner or inner == [Any]:
            return "a list"
        if origin is tuple and ... not in arguments:
            return f"a list of {len(inner)}: " + ", ".join(words(part) for part in inner)
        return f"a list, each {words(inner[0])}"
    if origin in _MAPPINGS or wanted in _MAPPINGS or dataclasses.is_dataclass(wanted):
        return "a mapping"
    return _WORDS.get(wanted, getattr(wanted, "__name__", str(wanted)))


def as_yaml(value: Any) -> str:
    """``value`` as YAML would have it."""
    try:
        return json.dumps(value) if not isinstance(value, str) else repr(value)
    except TypeError:
        return repr(value)


def _fit(value: Any, wanted: Any, key: str, nested: Nested) -> Any:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Annotated:
        return _fit(value, arguments[0], key, nested)
    if origin in _UNIONS:
        return _fit_one_of(value, arguments, key, nested)
    if origin is Literal:
        return _fit_literal(value, arguments)
    kind = origin or wanted
    if kind in _LISTS:
        return _fit_list(value, kind, arguments, key, nested)
    if kind in _MAPPINGS:
        return _fit_mapping(value, arguments, key, nested)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, Mapping):
            return nested(kind, value, key)
        return _only(value, not _is_plain(value))
    return _fit_scalar(value, kind)


def _fit_scalar(value: Any, kind: Any) -> Any:
    if kind is type(None):
        return _only(value, value is None)
    if kind is bool:
        return _only(value, isinstance(value, bool))
    if kind is int:
        whole = isinstance(value, float) and value.is_integer()
        return int(_only(value, _is_int(value) or whole))
    if kind is float:
        return float(_only(value, _is_int(value) or isinstance(value, float)))
    if kind is str:
        return _only(value, isinstance(value, str))
    if inspect.isclass(kind) and issubclass(kind, Path):
        return Path(_only(value, isinstance(value, str)))
    return value


def _fit_one_of(value: Any, arguments: tuple[Any, ...], key: str, nested: Nested) -> Any:
    # An exact type first: 1 stays a whole number for `float | int`, and "1" a text.
    exact = [part for part in arguments if part is type(value)]
    for part in [*exact, *arguments]:
        try:
            return _fit(value, part, key, nested)
        except _Unfit:
            continue
    raise _Unfit


def _fit_literal(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    raise _Unfit


def _fit_list(value: Any, kind: Any, arguments: tuple[Any, ...], key: str, nested: Nested) -> Any:
    if not isinstance(value, list | tuple):
        return _only(value, not _is_plain(value))
    parts: list[Any]
    if kind is tuple and arguments and arguments[-1] is not ...:
        _only(value, len(value) == len(arguments))
        parts = list(arguments)
    else:
        parts = [arguments[0] if arguments else Any] * len(value)
    items = [
        fit_value(item, part, key=f"{key}[{i}]", nested=nested)
        for i, (item, part) in enumerate(zip(value, parts, strict=True))
    ]
    return _LISTS[kind](items)


def _fit_mapping(value: Any, arguments: tuple[Any, ...], key: str, nested: Nested) -> Any:
    if not isinstance(value, Mapping):
        return _only(value, not _is_plain(value))
    part = arguments[1] if len(arguments) == 2 else Any
    return {
        name: fit_value(item, part, key=f"{key}.{name}", nested=nested)
        for name, item in value.items()
    }


def _only(value: Any, fits: bool) -> Any:
    if not fits:
        raise _Unfit
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Whether ``value`` came from YAML as it is; anything else is a stand-in for an object."""
    return value is None or isinstance(value, bool | int | float | str | list | tuple | dict)


def _choices(wanted: Any) -> list[str]:
    """The names among which ``wanted`` lets choose."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in _UNIONS:
        return [name for part in arguments for name in _choices(part)]
    return [str(name) for name in arguments] if origin is Literal else []


def _advice(value: Any, wanted: Any, key: str, default: Any) -> str:
    offer = nearest(value, _choices(wanted)) if isinstance(value, str) else ""
    if offer.startswith("did you mean") or (offer and typing.get_origin(wanted) is Literal):
        return offer
    if isinstance(value, int | float) and "a text" in words(wanted):
        return f"write it in quotes: '{key}=\"{value}\"'"
    if words(wanted).startswith("a list"):
        return f"write {key}=[...]"
    if words(wanted).startswith("a mapping"):
        return f"write '{key}={{NAME: VALUE}}'"
    if default is inspect.Parameter.empty:
        return f"write {key}=VALUE"
    return f"the default is {as_yaml(default)}"


def fill_marks(value: Any, marks: Mapping[str, Any]) -> Any:
    """``value`` with what each mark stands for, alone or within a longer text."""
    if isinstance(value, Mapping):
        return {key: fill_marks(each, marks) for key, each in value.items()}
    if isinstance(value, list):
        return [fill_marks(each, marks) for each in value]
    if not isinstance(value, str) or "\0" not in value:
        return value
    if value in marks:
        return marks[value]
    for mark, meant in marks.items():
        value = value.replace(mark, str(meant))
    return value
