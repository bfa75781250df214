"""The text of a script as a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torsh_trainer.errors import ConfigError


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


def find_imports(tree: ast.Module) -> Iterator[str]:
    """The full names of everything that a script imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
