"""Whether the modules of a script's project can be imported, by which name, and from where."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torsh_trainer.translate.python.project import ScriptProject

_READS_ARGUMENTS = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
_STARTS = (
    "init",
    "init_distributed",
    "initialize",
    "init_process_group",
    "exit",
    "backward",
    "DistributedOptimizer",
)


@dataclass(frozen=True)
class NoImport:
    """Why a module cannot be imported: what its top level does in a line, and the next move."""

    file: str
    line: int
    what: str
    fix: str


@dataclass
class Importer:
    """Modules by their names for places (empty: the script). ``roots`` are folders that have to be
    found by Python for what was imported."""

    script: Path
    tree: ast.Module
    project: ScriptProject
    roots: dict[Path, None] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    """Modules with the names by which the script imports them."""

    def path_of(self, file: str) -> Path:
        """The file of a module."""
        if not file:
            return self.script
        beside = self.script.absolute().parent
        return next((p for p in self.project.files if p.absolute() == beside / file), Path(file))

    def tree_of(self, file: str) -> ast.Module:
        """Its syntax."""
        if not file:
            return self.tree
        tree = self.project.files.get(self.path_of(file))
        return ast.Module([], []) if tree is None else tree

    def has(self, file: str, node: ast.AST) -> bool:
        """Whether a definition stands at the top level of a module."""
        return any(part is node for part in _list_top(self.tree_of(file).body))

    def keeps(self, file: str, node: ast.stmt) -> bool:
        """Whether importing a module makes what this statement at its top level binds."""
        if self.explain(file) is not None:
            return False
        return any(part is node for part in _list_top(self.tree_of(file).body))

    def import_name(self, file: str) -> str:
        """The full name of a module; enters the folder that it is found from."""
        path = self.path_of(file).absolute()
        own = [path.stem] if path.stem != "__init__" else []
        parts, folder = list(own), path.parent
        while (folder / "__init__.py").is_file() and folder.name.isidentifier():
            parts.insert(0, folder.name)
            folder = folder.parent
        spelled = self.spelled.get(file, "").split(".")
        more = len(spelled) - len(parts)  # folders without __init__.py are packages, too
        if more > 0 and [*folder.parts, *parts][-len(spelled) :] == spelled:
            parts, folder = spelled, folder.parents[more - 1]
        self.roots[folder] = None
        return ".".join(parts)

    def explain(self, file: str) -> NoImport | None:
        """Why a module cannot be imported; None where it can."""
        path = self.path_of(file)
        name = path.name
        if path.suffix != ".py" or not path.stem.isidentifier():
            fix = "rename it to letters, digits and _, with the ending .py"
            return NoImport(name, 1, f"{name} is no name that Python can import", fix)
        tree = self.tree_of(file)
        functions = {
            part.name: part for part in _list_top(tree.body) if isinstance(part, ast.FunctionDef)
        }
        for statement in _list_top(tree.body):
            found = next(_list_work(statement, functions, frozenset()), None)
            if found is not None:
                what = f"importing {name} would run {found[1]} (line {found[0]})"
                fix = 'move the training into a function, called under `if __name__ == "__main__":`'
                return NoImport(name, statement.lineno, what, fix)
        return None


def _list_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import runs: all but those under the guard."""
    for node in body:
        if isinstance(node, ast.If):
            if is_guard(node.test):
                yield from _list_top(node.orelse)
            else:
                yield ast.copy_location(ast.Expr(node.test), node)
                yield from _list_top([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            inner = [part for handler in node.handlers for part in handler.body]
            yield from _list_top([*node.body, *inner, *node.orelse, *node.finalbody])
        else:
            yield node


def is_guard(test: ast.expr) -> bool:
    """``__name__ == "__main__"``."""
    return isinstance(test, ast.Compare) and "__name__" in ast.unparse(test)


def _list_work(
    statement: ast.AST, functions: dict[str, ast.FunctionDef], entered: frozenset[str]
) -> Iterator[tuple[int, str]]:
    """Calls of a statement that start a job: (line, words)."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    if isinstance(statement, ast.ClassDef) and entered:
        return
    if isinstance(statement, ast.Call):
        func = statement.func
        last = func.attr if isinstance(func, ast.Attribute) else ""
        last = func.id if isinstance(func, ast.Name) else last
        if last in _READS_ARGUMENTS or (last in _STARTS and _is_of_engine(func)):
            yield statement.lineno, f"{ast.unparse(func)}()"
        elif isinstance(func, ast.Name) and last in functions and last not in entered:
            inner = functions[last]
            for part in inner.body:
                for _, what in _list_work(part, functions, entered | {last}):
                    yield statement.lineno, f"{last}(), and so {what}" if "," not in what else what
                    return
    for child in ast.iter_child_nodes(statement):
        yield from _list_work(child, functions, entered)


def _is_of_engine(func: ast.expr) -> bool:
    """``hvd.init``, ``deepspeed.initialize``, ``loss.backward`` and the like, no module's of torch
    (``nn.init``)."""
    text = ast.unparse(func)
    owner = text.rpartition(".")[0]
    return owner.rpartition(".")[2] not in ("nn", "colorama", "pygame", "mlflow") and (
        text.endswith(".backward")
        or not text.endswith(".init")
        or owner in ("hvd", "horovod", "bps", "horovod.torch")
    )
