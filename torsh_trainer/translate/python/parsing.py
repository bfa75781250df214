"""The text of a script as a syntax tree."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.plan import Fact
from torsh_trainer.translate.python.events import Skipped, calls
from torsh_trainer.translate.reading import text_of


def parse(text: str, *, name: str) -> ast.Module:
    """The syntax tree.

    Raises:
        ConfigError: it is not Python of this version.
    """
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        column = getattr(error, "offset", None) or 1
        words = getattr(error, "msg", None) or str(error)
        raise ConfigError(
            f"{name}:{line}:{column}: this Python cannot parse it: {words}",
            fix="correct it there; a script of Python 2 has to be converted first",
            line=line,
            column=column,
        ) from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{name} is nested too deep", fix="simplify it") from error


def read_source(path: Path) -> str:
    """The Python of a file: its text, or the code cells of a notebook, one after the other.

    Lines of a notebook that are for its kernel (``%`` and ``!``) are blank.

    Raises:
        ConfigError: it is no text, or no notebook.
        ResourceError: it cannot be read.
    """
    text = text_of(path)
    if path.suffix.lower() != ".ipynb":
        return text
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no notebook", fix="save it anew, or export it as a script"
        ) from error
    lines = [line for source in sources for line in [*source.splitlines(), ""]]
    return "\n".join("" if line.lstrip()[:1] in ("%", "!", "?") else line for line in lines)


def ask_for_branch(branch: Skipped, pattern: str, what: str, *, file: str) -> list[Fact]:
    """The questions whether the conditions hold under which the script does ``what``: it calls
    there as ``pattern`` says."""
    asked = []
    now, then = ("true", "false") if branch.holds else ("false", "true")
    look = f"it is {now} with these arguments, and the script does so where it is {then}"
    test, line, body = branch.test, branch.place.line, list(branch.body)
    while True:
        where = f"{what} ({branch.file or file}:{line})"
        asked.append(Fact(test, where, look, line, then))
        inner = _find_condition(body, pattern)
        if inner is None:
            return asked
        then = "true" if calls(inner.body, pattern) else "false"
        look = f"the script does so where it is {then}"
        test, line = ast.unparse(inner.test), inner.lineno
        body = inner.body if then == "true" else inner.orelse


def _find_condition(body: list[ast.stmt], pattern: str) -> ast.If | None:
    """The outermost condition within ``body`` under which it calls so."""
    for node in (node for part in body for node in ast.walk(part)):
        if isinstance(node, ast.If) and calls([node], pattern):
            return node
    return None


def note_lines(path: Path) -> list[str]:
    """Words on how lines are counted, where that is not plain."""
    notebook = path.suffix.lower() == ".ipynb"
    return ["lines are counted through the code cells, with one between"] if notebook else []


def find_imports(tree: ast.Module) -> Iterator[str]:
    """The full names of everything that a script imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
