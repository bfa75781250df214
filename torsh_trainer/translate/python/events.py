"""What reading a script comes to: what happens in it, in the order of a run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
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
class ScriptReading:
    """What a script does, in the order of a run; ``used`` are the settings that were asked for.

    ``is_whole``: all of it was followed; a script of very many statements is not. ``frames`` are
    all calls of its functions, and the modules.
    """

    events: tuple[Event, ...]
    used: frozenset[str]
    is_whole: bool = True
    frames: tuple[Frame, ...] = ()

    def all(self, what: str) -> list[Event]:
        """The events of one sort."""
        return [event for event in self.events if event.what == what]


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
    """Names within a function; those that it declares global are the module's."""

    def __init__(
        self,
        scope: Scope,
        module: Scope,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
    ) -> None:
        super().__init__(scope)
        self.node, self.module = node, module
        self.outer = {
            name for part in node.body if isinstance(part, ast.Global) for name in part.names
        }

    def __copy__(self) -> FunctionScope:
        return FunctionScope(self, self.module, self.node)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.outer:
            self.module[name] = value
        else:
            super().__setitem__(name, value)


def place_of(node: ast.AST) -> Place:
    """Where a node stands."""
    return Place(getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1)


TOO_LONG = "the script has more statements than are followed: what comes last in a run was not read"
"""What is said of a reading that is not whole."""
