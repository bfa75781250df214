"""What is read of a file, and a mistake in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torsh_trainer.translate.nodes import Node

PieceKind = Literal["shell", "dockerfile", "compose", "kubernetes", "yaml", "source", "page"]


@dataclass(frozen=True)
class ScriptMistake:
    """A mistake: where it stands, what is said there, what happens, and the correction."""

    name: str
    file: str
    line: int
    said: str
    why: str
    fix: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class ScriptPiece:
    """A file, or a block of a page, of one kind; lines are those of the file.

    ``text`` begins with as many empty lines as stand before it in the file. ``root`` is what a
    YAML document holds. ``is_whole`` says that it is a file, and no block of a page.
    """

    kind: PieceKind
    file: str
    text: str
    is_whole: bool = True
    root: Node | None = None

    @property
    def first(self) -> int:
        """The line on which it begins."""
        return len(self.text) - len(self.text.lstrip("\n")) + 1

    def line(self, number: int) -> str:
        """The text of a line."""
        lines = self.text.splitlines()
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""

    def lines(self) -> Iterator[tuple[int, str]]:
        """Every line that holds something, with its number."""
        for number, line in enumerate(self.text.splitlines(), 1):
            if line.strip():
                yield number, line

    def join_lines(self) -> Iterator[tuple[int, str]]:
        """Lines without remarks, those that go on behind a backslash as one; the first's number."""
        held, first = "", 0
        for number, line in self.lines():
            if line.lstrip().startswith("#"):
                continue
            first = first or number
            if line.rstrip().endswith("\\"):
                held += line.rstrip()[:-1] + " "
                continue
            yield first, (held + line).strip()
            held, first = "", 0

    def mistake(self, name: str, line: int, *, why: str, fix: str, said: str = "") -> ScriptMistake:
        """One of this piece; ``said`` is the line where nothing else is given."""
        return ScriptMistake(name, self.file, line, said or self.line(line), why, fix)


@dataclass(frozen=True)
class ScriptExamination:
    """All mistakes of some files, in the order of their lines.

    ``unread`` are files, and blocks of pages, that could not be read, with the reason.
    """

    files: tuple[str, ...]
    pieces: Mapping[str, int] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    mistakes: tuple[ScriptMistake, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "files": list(self.files),
            "read": dict(self.pieces),
            "unread": list(self.unread),
            "mistakes": [one.as_dict() for one in self.mistakes],
        }


PieceRule = Callable[[ScriptPiece], Iterator[ScriptMistake]]
"""A function from a piece to its mistakes."""


def node_at(node: Node | None, *path: str) -> Node | None:
    """What stands below a YAML node at a path of keys; None where nothing does."""
    for key in path:
        if node is None or not node.is_mapping or key not in node.value:
            return None
        node = node.value[key].node
    return node
