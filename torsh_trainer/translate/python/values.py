"""What a script's expressions stand for, as far as reading them tells."""

from __future__ import annotations

import ast
import math
import operator
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from torsh_trainer.translate.nodes import Place


@lru_cache(maxsize=4096)
def write_expression(node: ast.expr) -> str:
    """An expression as Python writes it."""
    return ast.unparse(node)


@dataclass(frozen=True)
class Unknown:
    """What only a run would tell: ``of`` is its expression, or words for it. ``divided``: by what
    it was divided since it was made. ``under``: the condition on which alone a block is set."""

    of: str | ast.expr
    place: Place
    divided: Any = 1
    under: str = ""

    @property
    def text(self) -> str:
        """The expression as Python writes it."""
        return self.of if isinstance(self.of, str) else write_expression(self.of)


@dataclass(frozen=True)
class ImportedName:
    """Something imported, by its full name: ``torch.optim.SGD``."""

    dotted: str


@dataclass
class Thing:
    """An object that matters: ``kind`` says which, ``facts`` what is known of it."""

    kind: str
    place: Place
    facts: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Attributes with the frame and the step in which they were set."""
    is_untold: bool = False
    """Attributes were set whose names cannot be told: none is known."""


class ScriptDict(dict[str, Any]):
    """A dictionary of the script. ``places``: where its keys stand, and in which file; ``untold``
    are changes of which reading cannot tell the key, as they are written, with their places;
    ``asked`` are keys that the script itself reads, of this one or of what it was copied from."""

    def __init__(self, items: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__(items)
        self.places: dict[str, tuple[Place, str]] = dict(getattr(items, "places", {}))
        self.untold: list[tuple[str, Place, str]] = list(getattr(items, "untold", []))
        self.asked: set[str] = getattr(items, "asked", set())

    def put(self, key: str, value: Any, place: Place, file: str) -> None:
        """``record[key] = value``, said at ``place``."""
        self[key] = value
        self.places[key] = (place, file)

    def mark_untold(self, text: str, place: Place, file: str) -> None:
        """Enters a change of which the key cannot be told."""
        self.untold.append((text, place, file))

    def read(self, key: str) -> Any:
        """``record[key]``, which the script asks for."""
        self.asked.add(key)
        return self[key]

    def copy(self) -> ScriptDict:
        """A shallow copy, places included."""
        return ScriptDict(self)


class Attributes(ScriptDict):
    """``vars(thing)``: the attributes of an object, which are set by what is put here."""

    def __init__(self, thing: Thing) -> None:
        super().__init__({k: v for k, v in thing.facts.items() if not k.startswith("__")})
        self.thing = thing

    def put(self, key: str, value: Any, place: Place, file: str) -> None:
        super().put(key, value, place, file)
        self.thing.facts[key] = value

    def mark_untold(self, text: str, place: Place, file: str) -> None:
        super().mark_untold(text, place, file)
        self.thing.is_untold = True


def copy_record(value: Any) -> Any:
    """A dictionary of the script with its own copies of all that is in it, places included."""
    if isinstance(value, ScriptDict):
        made = value.copy()
        made.update({key: copy_record(inner) for key, inner in value.items()})
        return made
    return [copy_record(item) for item in value] if isinstance(value, list) else value


@dataclass
class Module:
    """A file of the script's own project: what its top level defines, once it has been read.

    ``file`` is its name for places, empty for the script itself.
    """

    file: str
    scope: dict[str, Any] = field(default_factory=dict)


@dataclass
class Kind:
    """A class of the script, and the objects that were made of it."""

    node: ast.ClassDef
    module: Module
    made: list[Thing] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What its body sets by name."""

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        """By name."""
        return {part.name: part for part in self.node.body if isinstance(part, ast.FunctionDef)}


@dataclass(frozen=True)
class Function:
    """A function of the script, or the method of a class. ``enclosing``: the names of the function
    in which it is defined."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    module: Module
    kind: Kind | None = None
    enclosing: dict[str, Any] | None = None
    frame: Any = field(default=None, compare=False, repr=False)
    """The frame of that function."""

    @property
    def name(self) -> str:
        """With its class, where it has one."""
        return self.node.name if self.kind is None else f"{self.kind.node.name}.{self.node.name}"


def function_of_lambda(node: ast.Lambda, module: Module) -> Function:
    """A lambda as a function that returns its expression."""
    body = ast.copy_location(ast.Return(node.body), node)
    made = ast.FunctionDef("<lambda>", node.args, [body], [], None, None)
    return Function(ast.copy_location(made, node), module)


def callable_is_known(value: Any) -> bool:
    """Whether a value is something that a call can be followed into, or that has a full name."""
    return isinstance(value, Function | Kind | ImportedName) or (
        isinstance(value, Thing) and value.kind == "partial"
    )


PLAIN = (bool, int, float, str, type(None))
_LONGEST = 10_000
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda a, b: a is b or (a == b and isinstance(a, str)),
    ast.IsNot: lambda a, b: not (a is b or (a == b and isinstance(a, str))),
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "bool": bool,
    "float": float,
    "int": int,
    "len": len,
    "max": max,
    "min": min,
    "round": round,
    "sorted": sorted,
    "str": str,
    "sum": sum,
    "os.path.abspath": posixpath.normpath,
    "os.path.basename": posixpath.basename,
    "os.path.dirname": posixpath.dirname,
    "os.path.normpath": posixpath.normpath,
    "os.path.realpath": posixpath.normpath,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.log": math.log,
    "math.sqrt": math.sqrt,
    "math.log2": math.log2,
    "numpy.ceil": math.ceil,
    "numpy.floor": math.floor,
    "numpy.sqrt": math.sqrt,
}
"""What is computed while reading."""


def is_number(value: Any) -> bool:
    """An int or a float, no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_plain(value: Any) -> bool:
    """A constant, or a list, tuple or dict of them."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, PLAIN)


def combine(node: ast.BinOp, left: Any, right: Any, otherwise: Unknown) -> Any:
    """``left op right``; of an unknown number it is remembered by what it was divided."""
    if is_number(left) and is_number(right) and _small(node.op, left, right):
        return compute(_BINARY.get(type(node.op)), left, right, otherwise=otherwise)
    if isinstance(node.op, ast.Add) and type(left) is type(right) and _joins(left, right):
        return left + right
    if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Div):
        return posixpath.join(left, right)  # of paths
    if isinstance(left, Unknown) and isinstance(node.op, ast.Div):
        return replace(otherwise, divided=times(left.divided, right))
    if isinstance(node.op, ast.Mult):
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Unknown) and one.divided != 1 and is_number(other) and other:
                return replace(otherwise, divided=times(one.divided, 1 / other))
    return otherwise


def division_of(value: Any) -> Any:
    """By what a number was divided since it was made."""
    return value.divided if isinstance(value, Unknown) else 1


def times(divided: Any, more: Any) -> Any:
    """Divided by ``divided``, and by ``more`` after that."""
    if is_number(divided) and is_number(more):
        return divided * more
    return more if divided == 1 else divided


_OBJECTS = (Thing, Function, Kind, Module, dict, list, tuple)
_IDENTITIES = (ast.Is, ast.IsNot)


def compare(node: ast.Compare, values: list[Any], otherwise: Unknown) -> Any:
    """A chain of comparisons."""
    asks_for_none = len(values) == 2 and values[1] is None
    if asks_for_none and isinstance(values[0], _OBJECTS) and isinstance(node.ops[0], _IDENTITIES):
        return isinstance(node.ops[0], ast.IsNot)
    if not all(is_plain(value) for value in values):
        return otherwise
    result: Any = True
    for op, left, right in zip(node.ops, values, values[1:], strict=False):
        result = compute(_COMPARED.get(type(op)), left, right, otherwise=otherwise)
        if isinstance(result, Unknown) or not result:
            return result
    return result


def compute(function: Callable[..., Any] | None, *values: Any, otherwise: Unknown) -> Any:
    """``function(*values)``, where it has a value."""
    if function is None:
        return otherwise
    try:
        return function(*values)
    except (ArithmeticError, TypeError, ValueError):
        return otherwise


def _small(op: ast.operator, left: Any, right: Any) -> bool:
    """Nothing that takes long."""
    if isinstance(op, ast.Pow):
        return abs(right) <= 64 and abs(left) <= 1e6
    return abs(left) < 1e100 and abs(right) < 1e100


def _joins(left: Any, right: Any) -> bool:
    return isinstance(left, str | list | tuple) and len(left) + len(right) < _LONGEST
