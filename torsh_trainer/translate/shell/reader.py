"""What every part of the reader of a shell file shares: its text, its commands, its statements."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.shell.expansion import Expander
from torsh_trainer.translate.shell.grammar import check_closed, parse
from torsh_trainer.translate.shell.state import ShellState
from torsh_trainer.translate.shell.words import Command, Word, WrittenFile, word_of

MOST_COMMANDS = 5000
"""A file that would run more is not read."""

DEEPEST = 40
"""Statements within statements, and texts within texts."""

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REMARKS = re.compile(r"`#[^`\n]*`")
"""A remark within a line that goes on: a substitution of nothing."""

_TO_FILL = re.compile(r"((?:^|\s)--?[\w-]+[ =])<([A-Za-z_][\w-]*)>(?=\s|$)", re.MULTILINE)
"""``--output_dir <output_dir>``, which a user is meant to fill in."""

_SKIPPED = frozenset({"comment", "heredoc_body", "heredoc_end", "heredoc_start"})

OpenText = Callable[[str, str], "str | None"]


class ShellReader(abc.ABC):
    """Reads statements of one text; readers of texts within it share its commands.

    ``handlers`` are its methods by the kinds of nodes that they read.
    """

    handlers: ClassVar[Mapping[str, Callable[[Any, Any, ShellState], None]]]

    def __init__(
        self,
        text: str,
        name: str,
        outer: ShellReader | None = None,
        open_text: OpenText | None = None,
    ) -> None:
        text = _REMARKS.sub(lambda m: " " * len(m[0]), text.replace("\r\n", "\n"))
        text = _TO_FILL.sub(lambda m: f"{m[1]}${{{m[2].replace('-', '_')}}}", text)
        self.name = name
        self.root = parse(text)
        lines = text.encode("utf-8", "replace").split(b"\n")
        check_closed(self.root, name=name, lines=lines)
        self.expander = Expander(lines, name)
        self.commands: list[Command] = outer.commands if outer else []
        self.files: dict[str, WrittenFile] = outer.files if outer else {}
        self.counted: list[int] = outer.counted if outer else [0]
        self.depth: int = outer.depth if outer else 0
        self.unset: dict[str, None] = outer.unset if outer else {}
        self.open_text: OpenText | None = outer.open_text if outer else open_text
        self.sourced: dict[str, bool] = outer.sourced if outer else {}

    def run(self, nodes: Sequence[Any], state: ShellState) -> None:
        """Reads statements in order, until one ends them."""
        for node in nodes:
            if state.ended:
                return
            if node.is_named and node.type not in _SKIPPED:
                self.statement(node, state)

    def statement(self, node: Any, state: ShellState) -> None:
        self.counted[0] += 1
        if self.counted[0] > MOST_COMMANDS:
            raise ConfigError(
                f"{self.name}: it would run more than {MOST_COMMANDS} commands",
                fix="give the line that starts the job with --command",
            )
        if self.depth > DEEPEST:
            return
        self.depth += 1
        try:
            handler = self.handlers.get(node.type)
            if handler is not None:
                handler(self, node, state)
            elif node.children:
                self.run(node.children, state)
        finally:
            self.depth -= 1

    def keep(self, words: tuple[Word, ...], prefix: dict[str, Word], state: ShellState) -> None:
        exported = {
            name: word_of(value, place)
            for name, place in state.exported.items()
            if words and (value := state.lookup(name)) is not None
        }
        self.commands.append(
            Command(
                words,
                prefix,
                exported,
                state.conditions,
                state.rounds,
                state.around,
                state.folder,
            )
        )

    @abc.abstractmethod
    def start(self, words: list[Word], prefix: dict[str, Word], state: ShellState) -> None:
        """One command with its words: those of the shell itself are followed, others are kept."""
