"""The syntax of a shell file: tree-sitter and its grammar of bash, which an extra brings."""

from __future__ import annotations

from functools import cache
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.nodes import Place

EXTRA = "pip install 'torsh-trainer[shell]'"
_QUOTES = ("'", '"', "`")


@cache
def _parser() -> Any:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise ResourceError(
            "a shell file or a launch line is read by tree-sitter, which is not installed",
            fix=EXTRA,
        ) from error
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def parse(text: str) -> Any:
    """The root of the syntax tree of ``text`` (a ``tree_sitter.Node``).

    Raises:
        ResourceError: tree-sitter is not installed.
    """
    return _parser().parse(text.encode("utf-8", "replace")).root_node


def text_of_node(node: Any) -> str:
    """What stands in the file at ``node``."""
    return bytes(node.text or b"").decode("utf-8", "replace")


def place_of(node: Any, lines: list[bytes]) -> Place:
    """Where ``node`` begins, counted in characters; ``lines`` are those of the file."""
    row, column = node.start_point
    before = lines[row][:column] if row < len(lines) else b""
    return Place(row + 1, len(before.decode("utf-8", "replace")) + 1)


def check_closed(root: Any, *, name: str, lines: list[bytes]) -> None:
    """Makes sure that every quotation mark is closed.

    Raises:
        ConfigError: one is not, with its place.
    """
    if not root.has_error:
        return
    node = _find_open_quote(root)
    if node is None:
        return
    place = place_of(node, lines)
    raise ConfigError(
        f"{name}:{place}: a quotation mark {text_of_node(node)[0]} that nothing closes",
        fix="close it",
        line=place.line,
        column=place.column,
    )


def _find_open_quote(root: Any) -> Any:
    """The first error that begins with a quotation mark, and holds no other of its kind."""
    waiting = [root]
    while waiting:
        node = waiting.pop(0)
        if not (node.has_error or node.is_error or node.is_missing):
            continue
        if node.is_error or node.is_missing:
            text = text_of_node(node)
            if text[:1] in _QUOTES and text.count(text[0]) == 1:
                return node
        waiting[:0] = node.children
    return None
