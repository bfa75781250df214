"""From a node of the configuration (``_target_`` and its arguments) to the object that it names.

In two moves: ``plan`` imports the target and holds every argument against its signature, and
``ObjectPlan.build`` calls it. So a typo is found before anything heavy has happened, and a model
can be described here and made later, in another process.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torsh_trainer.assemble.values import check_finite, fit_value
from torsh_trainer.errors import ConfigError, TorshError, nearest
from torsh_trainer.utils.lookup import import_object

TARGET, PARTIAL = "_target_", "_partial_"


class Buildable(abc.ABC):
    """A stand-in, among the arguments of a plan, for an object that is made when the plan is."""

    @abc.abstractmethod
    def build(self) -> Any:
        """The object."""


@dataclass(frozen=True)
class ObjectPlan(Buildable):
    """An object that can be made: what to call, with which arguments, for which node."""

    key: str
    factory: Callable[..., Any]
    arguments: Mapping[str, Any]
    partial: bool = False

    def build(self) -> Any:
        """The object, new with every call.

        Raises:
            ConfigError: the constructor refuses its arguments.
        """
        arguments = {name: _build_all(value) for name, value in self.arguments.items()}
        if self.partial:
            return functools.partial(self.factory, **arguments)
        try:
            return self.factory(**arguments)
        except TorshError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.key}: {name_of(self.factory)} refuses what it was given: {error}",
                fix=f"look at {self.key}.*; debug=true shows the traceback",
            ) from error


@dataclass(frozen=True)
class Factory(Buildable):
    """A plan for somebody who decides himself when the object is made."""

    plan: ObjectPlan

    def build(self) -> Callable[[], Any]:
        return self.plan.build


def plan(
    node: Mapping[str, Any],
    *,
    key: str,
    given: Mapping[str, Any] | None = None,
    also: Collection[str] = (),
) -> ObjectPlan:
    """The plan of ``node``, the part of the configuration at ``key``.

    ``given`` are arguments that the configuration may not name; those that the target does not
    take are left out. ``also`` are further names to offer when one is mistyped.

    Raises:
        ConfigError: there is no such target, an argument is unknown, missing or of another type.
        ResourceError: the target needs a library that is not installed.
    """
    factory = target_of(node, key=key)
    arguments = {name: value for name, value in node.items() if name not in (TARGET, PARTIAL)}
    return plan_call(
        factory, arguments, key=key, given=given, also=also, partial=node.get(PARTIAL, False)
    )


def plan_call(
    factory: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    key: str,
    given: Mapping[str, Any] | None = None,
    also: Collection[str] = (),
    partial: bool = False,
) -> ObjectPlan:
    """The plan to call ``factory`` with ``arguments``, checked; see ``plan``."""
    signature = Signature.of(factory)
    given = given or {}
    for name in arguments:
        if name.startswith("_"):
            raise ConfigError(
                f"{key}.{name} is not known here",
                fix=f"a node has {TARGET}, {PARTIAL} and its knobs",
            )
        if name in given or not signature.takes(name):
            known = {*signature.names, *also} - {*given}
            offer = nearest(name, known) or f"{name_of(factory)} has no knobs"
            if offer.startswith("did you mean"):
                offer = re.sub(r"'(\w+)'", rf"{key}.\1", offer)
            raise ConfigError(f"unknown knob {key}.{name}", fix=offer, name=f"{key}.{name}")
    checked = {
        name: signature.fit(name, _plan_nodes(value, f"{key}.{name}"), key=f"{key}.{name}")
        for name, value in arguments.items()
    }
    taken = {name: value for name, value in given.items() if signature.takes(name)}
    missing = signature.required - {*checked, *taken}
    if missing and not partial:
        first = min(missing, key=signature.names.index)
        raise ConfigError(f"{key}.{first} has no value", fix=f"give {key}.{first}=VALUE")
    return ObjectPlan(key, factory, {**checked, **taken}, partial)


@dataclass(frozen=True)
class Signature:
    """What a callable takes: its parameters by name, their annotations, whether any name goes.

    ``finite`` is true for what is ours or torch's: no knob of theirs means anything by infinity.
    """

    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    open: bool
    finite: bool = False

    KINDS: ClassVar = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

    @classmethod
    def of(cls, factory: Callable[..., Any]) -> Signature:
        try:
            parameters = inspect.signature(factory).parameters
        except (TypeError, ValueError):  # written in C, without a signature
            return cls({}, {}, open=True)
        named = {name: p for name, p in parameters.items() if p.kind in cls.KINDS}
        kinds = {p.kind for p in parameters.values()}
        by_keyword = getattr(factory, "keywords_are_options", False)  # here they stand in `options`
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds and not by_keyword
        package = str(getattr(factory, "__module__", "")).partition(".")[0]
        finite = package == "torch" or package.startswith("torsh_")
        return cls(named, _hints(factory), open=takes_any, finite=finite)

    @property
    def names(self) -> list[str]:
        return list(self.parameters)

    @property
    def required(self) -> set[str]:
        """Parameters without a default."""
        return {n for n, p in self.parameters.items() if p.default is inspect.Parameter.empty}

    def takes(self, name: str) -> bool:
        return self.open or name in self.parameters

    def fit(self, name: str, value: Any, *, key: str) -> Any:
        """``value`` as the annotation of ``name`` asks for it."""
        parameter, hint = self.parameters.get(name), self.hints.get(name, Any)
        default = inspect.Parameter.empty if parameter is None else parameter.default
        if isinstance(value, ObjectPlan) and not value.partial and _asks_for_factory(hint):
            return Factory(value)
        if self.finite:
            check_finite(value, key=key, default=default)
        return fit_value(value, hint, key=key, default=default, nested=_plan_nested)


def _asks_for_factory(hint: Any) -> bool:
    """Whether an annotation names, perhaps among others, a callable that takes nothing."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_asks_for_factory(part) for part in arguments)
    return origin is Callable and len(arguments) == 2 and arguments[0] == []


def target_of(node: Mapping[str, Any], *, key: str) -> Any:
    """The class or function that ``node`` names, without a look at its arguments.

    Raises:
        ConfigError: there is no such target.
        ResourceError: it needs a library that is not installed.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"{key}: expected a mapping, got {node!r}", fix=f"choose {key}=NAME")
    if TARGET not in node:
        raise ConfigError(
            f"{key} has no {TARGET}, so there is nothing to make of it",
            fix=f"choose an option of its group ({key}=NAME), or add {key}.{TARGET}=package.Name",
        )
    target = node[TARGET]
    if not isinstance(target, str) or "." not in target.replace(":", "."):
        raise ConfigError(
            f"{key}.{TARGET}={target!r} is no import path", fix="write package.module.Name"
        )
    return _import_target(target, key)


def _import_target(target: str, key: str) -> Any:
    option = f"{key}.{TARGET}"
    try:
        found = import_object(target, option=option)
    except TorshError:
        raise
    except Exception as error:  # whatever the module does while it is imported
        line = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"{option}={target}: importing it fails with {type(error).__name__}: {line}",
            fix="correct the module; debug=true shows the traceback",
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{option}={target} is a {type(found).__name__}, which cannot be called",
            fix="name a class or a function",
        )
    return found


def _plan_nodes(value: Any, key: str) -> Any:
    """``value`` with every node in it, however deep, replaced by its plan."""
    if isinstance(value, Mapping):
        if TARGET in value:
            return None if value[TARGET] is None else plan(value, key=key)
        return {name: _plan_nodes(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [_plan_nodes(item, f"{key}[{i}]") for i, item in enumerate(value)]
    return value


def _plan_nested(kind: type, value: Mapping[str, Any], key: str) -> ObjectPlan:
    return plan_call(kind, value, key=key)


def _build_all(value: Any) -> Any:
    if isinstance(value, Buildable):
        return value.build()
    if type(value) is dict:
        return {name: _build_all(item) for name, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_build_all(item) for item in value)
    return value


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    source = factory
    if inspect.isclass(factory) and not dataclasses.is_dataclass(factory):
        source = factory.__init__
    try:
        return typing.get_type_hints(source)
    except (NameError, TypeError, AttributeError):  # names for type checkers alone: no check
        return {}


def name_of(factory: Callable[..., Any]) -> str:
    """The import path of a class or function."""
    return f"{factory.__module__}.{getattr(factory, '__qualname__', factory)}"
