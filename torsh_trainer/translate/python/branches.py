"""Questions for the conditions of branches that a script does not take."""

from __future__ import annotations

import ast

from torsh_trainer.translate.plan import Fact
from torsh_trainer.translate.python.events import Skipped, calls


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
