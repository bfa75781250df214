"""The statements of a script in the order of a run, and who called whom.

A walk keeps values; what writes code needs the words as well: which statement gave a name its
value, with which expression a function was called. Nothing here knows what the statements mean.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.python.values import Module

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class WalkedStep:
    """A statement that was walked, or the head of a loop or ``with``.

    ``order`` counts through the whole walk. ``within`` are the loops, ``with`` and conditions that
    cannot be told around it in its function, outermost first. ``values`` are what the names that it
    binds stand for after it.
    """

    node: ast.stmt
    order: int
    within: tuple[ast.stmt, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Frame:
    """A call of a function of the script, or the top level of a module.

    ``node`` is the function; None for a module. ``caller`` made the call in its step number
    ``called_at``; a function that nothing in the script calls has none. ``given`` are parameters
    with the expressions of the call, ``closure`` is the frame in which the function was defined,
    ``top`` that of its module.
    """

    module: Module
    node: FunctionNode | None = None
    caller: Frame | None = None
    called_at: int = 0
    given: Mapping[str, ast.expr] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    closure: Frame | None = None
    top: Frame | None = None
    steps: list[WalkedStep] = field(default_factory=list)

    @property
    def now(self) -> int:
        """The number of the step that is being walked."""
        return len(self.steps) - 1

    def chain(self) -> Iterator[tuple[Frame, int]]:
        """This frame and those that led to it, each with the step of the call."""
        frame, at = self, len(self.steps)
        while True:
            yield frame, at
            if frame.caller is None:
                return
            frame, at = frame.caller, frame.called_at


def list_bound(node: ast.stmt) -> list[str]:
    """The names that a statement binds itself; of a compound one, its head alone."""
    targets: list[ast.expr] = []
    match node:
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name.partition(".")[0]) for alias in node.names]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            targets = node.targets
        case ast.AnnAssign() | ast.AugAssign() | ast.For() | ast.AsyncFor():
            targets = [node.target]
        case ast.With() | ast.AsyncWith():
            targets = [item.optional_vars for item in node.items if item.optional_vars]
        case _:
            pass
    found = [part for target in targets for part in _list_names(target)]
    for part in ast.walk(node) if isinstance(node, ast.Expr | ast.Assign) else ():
        if isinstance(part, ast.NamedExpr):
            found += _list_names(part.target)
    return found


def list_carried(loop: ast.stmt) -> list[ast.expr]:
    """Names and attributes to which a loop adds in each round: ``step += 1``, ``x = x * 2``."""
    found: dict[str, ast.expr] = {}
    for part in ast.walk(loop):
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name | ast.Attribute):
            found.setdefault(ast.unparse(part.target), part.target)
        elif isinstance(part, ast.Assign) and len(part.targets) == 1:
            target = part.targets[0]
            read = {one.id for one in ast.walk(part.value) if isinstance(one, ast.Name)}
            if isinstance(target, ast.Name) and target.id in read:
                found.setdefault(target.id, target)
    return list(found.values())


def _list_names(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Tuple | ast.List):
        return [name for part in target.elts for name in _list_names(part)]
    if isinstance(target, ast.Starred):
        return _list_names(target.value)
    return [target.id] if isinstance(target, ast.Name) else []


def match_arguments(definition: FunctionNode, node: ast.AST, *, bound: bool) -> dict[str, ast.expr]:
    """Parameters of a function with the expressions of a call of it.

    ``bound``: the first parameter is the object, which the call names before the dot, if at all.
    """
    if not isinstance(node, ast.Call):
        return {}
    names = [part.arg for part in (*definition.args.posonlyargs, *definition.args.args)]
    given: dict[str, ast.expr] = {}
    if bound and names:
        first = names.pop(0)
        if isinstance(node.func, ast.Attribute):
            given[first] = node.func.value
    for name, arg in zip(names, node.args, strict=False):
        if isinstance(arg, ast.Starred):
            break
        given[name] = arg
    known = {*names, *(part.arg for part in definition.args.kwonlyargs)}
    given |= {k.arg: k.value for k in node.keywords if k.arg is not None and k.arg in known}
    return given
