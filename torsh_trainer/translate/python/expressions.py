"""Expressions of a script, as far as reading tells them."""

from __future__ import annotations

import abc
import ast
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from torsh_trainer.translate.python.environment import ScriptVariables
from torsh_trainer.translate.python.events import Scope, find_enclosing, place_of
from torsh_trainer.translate.python.objects import NOT_SET
from torsh_trainer.translate.python.values import (
    Function,
    ImportedName,
    Kind,
    Module,
    ScriptDict,
    Thing,
    Unknown,
    combine,
    compare,
    is_number,
    write_expression,
)

FLAGS = "flags.FLAGS"
"""What absl calls the flags of a script."""


class Expressions(abc.ABC):
    """``arguments`` are those of the command line, by destination or option; ``known`` values of
    expressions, by their text; ``used`` the names of both that were asked for. ``flags`` are those
    of absl that the script has defined."""

    def __init__(self, arguments: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        self.arguments, self.known = arguments, known
        self.used: set[str] = set()
        self.stated = {type(tree.body) for tree in map(_parse_stated, known) if tree is not None}
        self.module = Module("")
        self.flags: dict[str, Any] = {}
        self.environment = ScriptVariables(getattr(arguments, "environment", {}), known)

    @abc.abstractmethod
    def call(self, node: ast.Call, scope: Scope) -> Any:
        """The value of a call."""

    @abc.abstractmethod
    def name_script(self) -> str:
        """The script as it was started."""

    @abc.abstractmethod
    def call_value(
        self, target: Any, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        """The value of a call of whatever stands for the function."""

    @abc.abstractmethod
    def look_up(self, owner: Any, name: str, node: ast.expr) -> Any:
        """``owner.name`` of a class, an object or a record; ``NOT_SET`` where it is not told."""

    @abc.abstractmethod
    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        """``target = value``."""

    def find_method(self, kind: Kind, name: str) -> Function | None:
        """A method of a class of the script, its own or that of a base in the script."""
        if name in kind.methods:
            return Function(kind.methods[name], kind.module, kind)
        for node in kind.node.bases:
            base = self.value(node, kind.module.scope)
            found = self.find_method(base, name) if isinstance(base, Kind) else None
            if found is not None:
                return found
        return None

    def value(self, node: ast.expr, scope: Scope) -> Any:
        if type(node) in self.stated and (text := write_expression(node)) in self.known:
            self.used.add(text)
            return self.known[text]
        match node:
            case ast.Constant():
                return (
                    node.value
                    if isinstance(node.value, bool | int | float | str)
                    else (None if node.value is None else self.unknown(node))
                )
            case ast.Name():
                holder = find_enclosing(node.id, scope)
                if holder is not None:
                    return holder[node.id]
                return self.module.scope.get(node.id, ImportedName(node.id))
            case ast.Attribute():
                return self.attribute(node, scope)
            case ast.Call():
                return self.call(node, scope)
            case ast.BinOp():
                left, right = self.value(node.left, scope), self.value(node.right, scope)
                return combine(node, left, right, self.unknown(node))
            case ast.UnaryOp():
                return self.unary(node, scope)
            case ast.BoolOp():
                return self.boolean(node, scope)
            case ast.Compare():
                values = [self.value(part, scope) for part in (node.left, *node.comparators)]
                return compare(node, values, self.unknown(node))
            case ast.IfExp():
                truth = truth_of(self.value(node.test, scope))
                if truth is None:
                    self.value(node.body, scope)
                    self.value(node.orelse, scope)
                    return self.unknown(node)
                return self.value(node.body if truth else node.orelse, scope)
            case ast.List():
                return [self.value(item, scope) for item in node.elts]
            case ast.Tuple():
                return tuple(self.value(item, scope) for item in node.elts)
            case ast.Dict():
                return self.dictionary(node, scope)
            case ast.JoinedStr():
                return self.text(node, scope)
            case ast.Subscript():
                return self.item(node, scope)
            case ast.NamedExpr():
                value = self.value(node.value, scope)
                self.assign(node.target, value, scope)
                return value
            case _:
                return self.unknown(node)

    def unknown(self, node: ast.expr) -> Unknown:
        return Unknown(node, place_of(node))

    def unary(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            truth = truth_of(value)
            return self.unknown(node) if truth is None else not truth
        if is_number(value) and isinstance(node.op, ast.USub):
            return -value
        return self.unknown(node)

    def boolean(self, node: ast.BoolOp, scope: Scope) -> Any:
        ends = isinstance(node.op, ast.Or)
        sure = True
        value: Any = None
        for part in node.values:
            value = self.value(part, scope)
            truth = truth_of(value)
            if truth is ends:
                return value if sure else truth
            sure = sure and truth is not None
        return value if sure else self.unknown(node)

    def text(self, node: ast.JoinedStr, scope: Scope) -> Any:
        """An f-string whose parts can be told, without formats."""
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value, scope)
                if part.format_spec is not None or part.conversion != -1:
                    return self.unknown(node)
            else:
                value = self.value(part, scope)
            if not isinstance(value, str | int | float):
                return self.unknown(node)
            parts.append(str(value))
        return "".join(parts)

    def dictionary(self, node: ast.Dict, scope: Scope) -> Any:
        """A dictionary with texts as keys; ``**other`` is laid out in it."""
        found = ScriptDict()
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope)
            if key is None and isinstance(value, ScriptDict):
                found.update(value)
                found.places.update(value.places)
                found.untold += value.untold
                continue
            name = None if key is None else self.value(key, scope)
            if key is None or not isinstance(name, str):
                return self.unknown(node)
            found.put(name, value, place_of(key), self.module.file)
        return found

    def item(self, node: ast.Subscript, scope: Scope) -> Any:
        owner, key = self.value(node.value, scope), self.value(node.slice, scope)
        if isinstance(owner, ScriptDict) and isinstance(key, str) and key in owner:
            return owner.read(key)
        if isinstance(owner, ImportedName) and owner.dotted == "os.environ":
            known = self.environment.knows(key)
            return self.environment.read(key) if known else self.unknown(node)
        whole = isinstance(key, int) and not isinstance(key, bool)
        if isinstance(owner, list | tuple) and whole and -len(owner) <= key < len(owner):
            return owner[key]
        return self.unknown(node)

    def attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self.value(node.value, scope)
        if isinstance(owner, ImportedName):
            if owner.dotted.endswith(FLAGS):
                return self.flags.get(node.attr, self.unknown(node))
            words = getattr(self.arguments, "words", None)
            if words is not None and f"{owner.dotted}.{node.attr}" == "sys.argv":
                return [self.name_script(), *words]
            return ImportedName(f"{owner.dotted}.{node.attr}")
        if isinstance(owner, str) and node.attr in ("parent", "name"):  # of a path
            return str(getattr(PurePosixPath(owner), node.attr))
        if isinstance(owner, Module):
            return owner.scope.get(node.attr, self.unknown(node))
        found = self.look_up(owner, node.attr, node)
        if found is not NOT_SET:
            return found
        if isinstance(owner, Thing) and owner.kind == "arguments" and not owner.is_untold:
            return self.argument(owner, node)
        return self.unknown(node)

    def argument(self, owner: Thing, node: ast.Attribute) -> Any:
        if node.attr in self.arguments:
            self.used.add(node.attr)
            return self.arguments[node.attr]
        return self.unknown(node)


def _parse_stated(text: str) -> ast.Expression | None:
    """What ``--set`` states, where it is an expression."""
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return None


def truth_of(value: Any) -> bool | None:
    """Whether a condition holds; None where that cannot be told."""
    if isinstance(value, Unknown | ImportedName):
        return None
    if isinstance(value, Thing | Function | Kind | Module):
        return True
    return bool(value)
