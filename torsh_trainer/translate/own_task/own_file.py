"""The file that is being written: its imports and names, and what is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.own_task.importing import Importer
from torsh_trainer.translate.own_task.meanings import Variable

FILL_IN = "fill_in"
"""The function of the written file that names what is missing."""

ARGUMENTS = "arguments"
"""The name of the script's arguments in the written file."""


@dataclass(frozen=True)
class Missing:
    """Something that the user has to fill in: where the script has it, what, and what to do."""

    file: str
    line: int
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}; {self.fix}"


@dataclass
class OwnFile:
    """The file that is being written: its imports, constants, and what is missing.

    ``script`` is the name of the script for places; ``low``: the recipe computes in bf16 or fp16.
    """

    importer: Importer
    script: str
    low: bool = False
    imports: dict[str, None] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] | None = None
    unknown: dict[str, int] = field(default_factory=dict)
    missing: dict[Missing, None] = field(default_factory=dict)

    def miss(self, file: str, line: int, what: str, fix: str) -> Missing:
        """Enters what is missing."""
        found = Missing(file or self.script, line, what, fix)
        self.missing[found] = None
        return found

    def fill_in(self, file: str, node: ast.AST, what: str, fix: str) -> ast.expr:
        """A call that names what is missing."""
        found = self.miss(file, getattr(node, "lineno", 1), what, fix)
        call = ast.Call(ast.Name(FILL_IN, ast.Load()), [ast.Constant(str(found))], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def take_import(self, line: str, name: str, root: str) -> str:
        """Enters an import, and gives the name that it has here."""
        taken = self.names.setdefault(name, root)
        if taken == root:
            self.imports[line] = None
            return name
        other = f"{name}_2"
        self.names.setdefault(other, root)
        self.imports[re.sub(r"( as \w+)?$", f" as {other}", line)] = None
        return other


class Names:
    """Names of variables in one function of the written file, none of them twice."""

    def __init__(self, file: OwnFile, reserved: Iterable[str] = ()) -> None:
        self.file, self.reserved = file, set(reserved)
        self.found: dict[Variable, str] = {}

    def name_of(self, variable: Variable) -> str:
        """The name that a variable has there."""
        if variable not in self.found:
            taken = {*self.found.values(), *self.reserved}
            name, number = variable.name, 2
            while name in taken or (name in self.file.names):
                name, number = f"{variable.name}_{number}", number + 1
            self.found[variable] = name
        return self.found[variable]
