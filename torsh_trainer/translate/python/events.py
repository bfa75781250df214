"""What reading a script comes to: what happens in it, in the order of a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.python.frames import Frame


@dataclass(frozen=True)
class Event:
    """A call that matters. ``loops`` are the loops around it, outermost first, ``under`` the
    condition around it that cannot be told; ``every``: it is done in every so many-th round.
    ``file`` is another module's, where it stands in one; empty for the script itself. ``frame`` and
    ``step`` say where in the run, None of what the walk has not met itself."""

    what: str
    place: Place
    node: ast.AST
    facts: Mapping[str, Any]
    loops: tuple[int, ...] = ()
    under: str = ""
    every: int = 1
    file: str = ""
    frame: Frame | None = None
    step: int = 0


@dataclass(frozen=True)
class Skipped:
    """A branch that is not taken, since its condition ``test`` is what ``holds`` says."""

    test: str
    holds: bool
    place: Place
    body: tuple[ast.stmt, ...]
    file: str = ""


@dataclass(frozen=True)
class ScriptReading:
    """What a script does, in the order of a run; ``used`` are the settings that were asked for.

    ``is_whole``: all of it was followed; a script of very many statements is not. ``skipped`` are
    the branches that were not, ``frames`` all calls of its functions, and the modules, ``assumed``
    variables of the environment that were taken for unset, ``again`` places (with their files) at
    which something happens within several loops, of which an event has the first, ``uncalled``
    those in functions that nothing which was read calls.
    """

    events: tuple[Event, ...]
    used: frozenset[str]
    is_whole: bool = True
    skipped: tuple[Skipped, ...] = ()
    frames: tuple[Frame, ...] = ()
    assumed: tuple[str, ...] = ()
    again: frozenset[tuple[str, Place]] = frozenset()
    uncalled: frozenset[tuple[str, Place]] = frozenset()

    def all(self, what: str) -> list[Event]:
        """The events of one sort."""
        return [event for event in self.events if event.what == what]

    def find_skipped(self, pattern: str) -> Skipped | None:
        """The first branch that is not taken in which something is called as ``pattern`` says."""
        return next((branch for branch in self.skipped if calls(branch.body, pattern)), None)


def calls(body: Sequence[ast.stmt], pattern: str) -> bool:
    """Whether something is called in these statements as ``pattern`` says."""
    return any(
        isinstance(node, ast.Call) and re.search(pattern, ast.unparse(node.func))
        for part in body
        for node in ast.walk(part)
    )


Scope = dict[str, Any]


@dataclass
class Around:
    """Where the walk is: the loops and conditions around it. ``of_gradients``: within a function
    that has been handed gradients."""

    loops: tuple[int, ...] = ()
    under: str = ""
    every: int = 1
    calls: tuple[str, ...] = ()
    of_gradients: bool = False


@dataclass
class Returned:
    """What a function has returned so far."""

    values: list[Any] = field(default_factory=list)


class FunctionScope(dict[str, Any]):
    """Names within a function; those that it declares global are the module's, and ``enclosing``
    has the names of the function around it, where it stands in one."""

    def __init__(
        self,
        scope: Scope,
        module: Scope,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        enclosing: Scope | None = None,
    ) -> None:
        super().__init__(scope)
        self.node, self.module, self.enclosing = node, module, enclosing
        self.outer = _list_declared(node, ast.Global)
        self.around = _list_declared(node, ast.Nonlocal)

    def __copy__(self) -> FunctionScope:
        return FunctionScope(self, self.module, self.node, self.enclosing)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.outer:
            self.module[name] = value
        elif name in self.around and self.enclosing is not None:
            self.enclosing[name] = value
        else:
            super().__setitem__(name, value)


def find_enclosing(name: str, scope: Scope) -> Scope | None:
    """The scope, from this one outwards to that of the module, which has ``name``."""
    found: Scope | None = scope
    while found is not None and name not in found:
        found = getattr(found, "enclosing", None)
    return found


def _list_declared(
    node: ast.FunctionDef | ast.AsyncFunctionDef, kind: type[ast.Global | ast.Nonlocal]
) -> set[str]:
    return {name for part in node.body if isinstance(part, kind) for name in part.names}


def place_of(node: ast.AST) -> Place:
    """Where a node stands."""
    return Place(getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1)


TOO_LONG = "the script has more statements than are followed: what comes last in a run was not read"
"""What is said of a reading that is not whole."""
