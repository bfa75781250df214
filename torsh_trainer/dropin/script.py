"""A script before it runs: whether it is Python, and which names of an engine's it uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.dropin.names import ENGINES
from torsh_trainer.errors import ConfigError

_PYTHON_2 = re.compile(
    r"^\s*(print\s+[^\s(=]|print\s*$|except\s+[\w.]+\s*,\s*\w+\s*:|exec\s+[\"'])"
)


@dataclass(frozen=True)
class Script:
    """A script that can be started."""

    path: Path
    uses: tuple[str, ...]
    """The engines that it imports where its text shows it: ``horovod``, ``deepspeed``."""
    takes_local_rank: bool = False
    """It has an argument ``--local_rank``, which DeepSpeed's launcher gives."""


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
    return Script(path, tuple(sorted(names.uses)), names.takes_local_rank)


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
    """Follows what ``import`` binds to an engine's modules, and looks at every name used of them.

    Modules are known by their whole name (``horovod.torch``). What stands in a ``try`` may be
    missing: a script that catches it knows what to do. So may a module that is imported under a
    condition, or in a function: it may never be reached.
    """

    def __init__(self, path: Path) -> None:
        self.uses: set[str] = set()
        self.takes_local_rank = False
        self._path = path
        self._modules: dict[str, str] = {}
        self._missing: dict[str, tuple[str, str]] = {}
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

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in ("--local_rank", "--local-rank"):
            self.takes_local_rank = True

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            if root not in ENGINES:
                continue
            self.uses.add(root)
            self._check_module(alias.name, node)
            if alias.asname:
                self._modules[alias.asname] = alias.name
            else:
                self._modules[root] = root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        root = module.partition(".")[0]
        if root not in ENGINES or node.level:
            return
        self.uses.add(root)
        self._check_module(module, node)
        for alias in node.names:
            if alias.name == "*":
                continue
            if not _is_public(module):
                self._missing[alias.asname or alias.name] = (module, alias.name)
                continue
            if not (module == root and alias.name in ENGINES[root].others and self._branches):
                self._check_name(module, alias.name, node)
            if _is_public(f"{module}.{alias.name}"):
                self._modules[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_Call(self, node: ast.Call) -> None:
        self._check_use(node.func)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            self._check_use(base)
        self.generic_visit(node)

    def _check_use(self, node: ast.expr) -> None:
        """Refuses what is certainly used, and stands in a module that is not there."""
        if isinstance(node, ast.Name) and node.id in self._missing and not self._branches:
            self._refuse(*self._missing[node.id], node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._check_use(node.value)
        module = self._module_of(node.value)
        if module is not None and not self._is_left(module, node.attr):
            self._check_name(module, node.attr, node)
        self.generic_visit(node)

    def _is_left(self, module: str, name: str) -> bool:
        """It is refused where it is used, if ever."""
        engine = ENGINES[module.partition(".")[0]]
        return (
            engine.late and module == engine.name and name in engine.others and self._branches > 0
        )

    def _module_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute):
            outer = self._module_of(node.value)
            inner = None if outer is None else f"{outer}.{node.attr}"
            return inner if inner is not None and _is_public(inner) else None
        return None

    def _check_module(self, module: str, node: ast.AST) -> None:
        if ENGINES[module.partition(".")[0]].late:
            return  # its names are refused where they are used
        for name in _enclosing(module) if not self._branches else ():
            outer, _, last = name.rpartition(".")
            if not _is_public(name):
                self._refuse(outer, last, node)
                return

    def _check_name(self, module: str, name: str, node: ast.AST) -> None:
        root, _, part = module.partition(".")
        if name not in ENGINES[root].public[part] and not name.startswith("__"):
            self._refuse(module, name, node)

    def _refuse(self, module: str, name: str, node: ast.AST) -> None:
        if self._tries:
            return
        root, _, part = module.partition(".")
        sentence, _, fix = ENGINES[root].explain(part, name).partition("; ")
        line = getattr(node, "lineno", 0)
        raise ConfigError(f"{self._path}:{line}: {sentence}", fix=fix, name=name)


def _is_public(module: str) -> bool:
    root, _, part = module.partition(".")
    return part in ENGINES[root].public


def _enclosing(module: str) -> Iterator[str]:
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
