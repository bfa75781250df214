"""A script before it runs: whether it is Python, and which of Horovod's names it uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.dropin.names import OTHERS, PUBLIC, explain_missing
from torsh_trainer.errors import ConfigError

_PYTHON_2 = re.compile(
    r"^\s*(print\s+[^\s(=]|print\s*$|except\s+[\w.]+\s*,\s*\w+\s*:|exec\s+[\"'])"
)
_NAME = "horovod"


@dataclass(frozen=True)
class Script:
    """A script that can be started."""

    path: Path
    uses_horovod: bool


def read(path: Path) -> Script:
    """The script at ``path``, once nothing of it is known to fail.

    Raises:
        ConfigError: it is missing, is not Python, or uses what is not there under drop-in.
    """
    source = _read_source(path)
    try:
        tree = ast.parse(source, str(path))
    except (SyntaxError, ValueError) as error:
        raise _explain_syntax(path, source, error) from error
    names = _Names(path)
    names.visit(tree)
    return Script(path, names.uses_horovod)


def _read_source(path: Path) -> str:
    if not path.exists():
        raise ConfigError(f"{path} is not there", fix="name the script that you would give python")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", fix="name the script in it")
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"{path} is a notebook", fix="jupyter nbconvert --to script makes a script of it"
        )
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}", fix="name a script") from error


def _explain_syntax(path: Path, source: str, error: SyntaxError | ValueError) -> ConfigError:
    lines = source.splitlines()
    at = next((n for n, line in enumerate(lines, start=1) if _PYTHON_2.match(line)), None)
    if at is not None and isinstance(error, SyntaxError):
        return ConfigError(
            f"{path}:{at}: {lines[at - 1].strip()!r} is Python 2", fix="2to3 -w rewrites the script"
        )
    if isinstance(error, SyntaxError):
        line = f":{error.lineno}" if error.lineno else ""
        return ConfigError(f"{path}{line}: {error.msg}", fix="correct the script")
    return ConfigError(f"{path} is not Python: {error}", fix="name a script")


class _Names(ast.NodeVisitor):
    """Follows what ``import`` binds to Horovod's modules, and looks at every name used of them.

    What stands in a ``try`` may be missing: a script that catches it knows what to do. So may a
    module that is imported under a condition, or in a function: it may never be reached.
    """

    def __init__(self, path: Path) -> None:
        self.uses_horovod = False
        self._path = path
        self._modules: dict[str, str] = {}
        self._tries = 0
        self._branches = 0

    def visit_Try(self, node: ast.Try) -> None:  # ast's name
        self._tries += 1
        for inner in node.body:
            self.visit(inner)
        self._tries -= 1
        for after in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(after)

    def visit_If(self, node: ast.If) -> None:
        self._visit_branch(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_branch(node)

    def _visit_branch(self, node: ast.AST) -> None:
        self._branches += 1
        self.generic_visit(node)
        self._branches -= 1

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root, *parts = alias.name.split(".")
            if root != _NAME:
                continue
            self.uses_horovod = True
            self._check_module(".".join(parts), node)
            if alias.asname:
                self._modules[alias.asname] = ".".join(parts)
            else:
                self._modules[_NAME] = ""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        root, *parts = (node.module or "").split(".")
        if root != _NAME or node.level:
            return
        self.uses_horovod = True
        module = ".".join(parts)
        self._check_module(module, node)
        for alias in node.names:
            if alias.name == "*" or module not in PUBLIC:
                continue
            inner = f"{module}.{alias.name}".removeprefix(".")
            if not (module == "" and alias.name in OTHERS and self._branches):
                self._check_name(module, alias.name, node)
            if inner in PUBLIC:
                self._modules[alias.asname or alias.name] = inner

    def visit_Attribute(self, node: ast.Attribute) -> None:
        module = self._module_of(node.value)
        if module is not None:
            self._check_name(module, node.attr, node)
        self.generic_visit(node)

    def _module_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute):
            outer = self._module_of(node.value)
            inner = None if outer is None else f"{outer}.{node.attr}".removeprefix(".")
            return inner if inner in PUBLIC else None
        return None

    def _check_module(self, module: str, node: ast.AST) -> None:
        for name in _enclosing(module) if not self._branches else ():
            outer, _, last = name.rpartition(".")
            if name and name not in PUBLIC:
                self._refuse(outer, last, node)
                return

    def _check_name(self, module: str, name: str, node: ast.AST) -> None:
        known = PUBLIC[module]
        if name not in known and not name.startswith("__"):
            self._refuse(module, name, node)

    def _refuse(self, module: str, name: str, node: ast.AST) -> None:
        if self._tries:
            return
        sentence, _, fix = explain_missing(module, name).partition("; ")
        line = getattr(node, "lineno", 0)
        raise ConfigError(f"{self._path}:{line}: {sentence}", fix=fix, name=name)


def _enclosing(module: str) -> Iterator[str]:
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
