"""The text of a script as a syntax tree."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from torsh_trainer.errors import ConfigError
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
