"""A shell file read from top to bottom: every command that would run, and files it writes.

Nothing is executed. What only a shell could tell stays a hole; a branch that cannot be decided is
read on both sides, and what then differs is a hole as well.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.shell.assignments import AssignmentReader, value_of
from torsh_trainer.translate.shell.branching import BranchReader
from torsh_trainer.translate.shell.grammar import text_of_node
from torsh_trainer.translate.shell.reader import ASSIGNMENT, DEEPEST, OpenText
from torsh_trainer.translate.shell.redirects import RedirectReader
from torsh_trainer.translate.shell.state import ShellState
from torsh_trainer.translate.shell.words import (
    Command,
    Hole,
    Word,
    WrittenFile,
    word_of,
)

_ENDS = {"exit": "exit", "return": "return", "break": "break", "continue": "continue"}
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")


@dataclass(frozen=True)
class ShellScript:
    """What a shell file comes to: its commands in order, and files that it writes by itself.

    ``assumed`` are variables and arguments that were taken for unset, since nothing in the file
    sets them, where a branch hangs on it. ``sourced`` are files that it takes in by ``source``, and
    whether they could be read.
    """

    commands: tuple[Command, ...]
    files: Mapping[str, WrittenFile] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    sourced: Mapping[str, bool] = field(default_factory=dict)


def commands(text: str, *, name: str, known: Mapping[str, str]) -> Iterator[Command]:
    """Every command of ``text``; ``known`` are values of variables that the user gives.

    Raises:
        ConfigError: a quotation mark is never closed, or there is more than can be read.
        ResourceError: what reads the syntax is not installed.
    """
    yield from read_script(text, name=name, known=known).commands


def read_script(
    text: str,
    *,
    name: str,
    known: Mapping[str, str],
    open_text: OpenText | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ShellScript:
    """``text`` as commands; ``name`` is how the user calls it, ``known`` what the user states,
    ``environment`` what the shell would inherit, and the text may assign anew.

    ``open_text`` gives the text of a file that ``source`` names, by its name and the folder that
    the file has entered by then; without it none is read.

    Raises:
        ConfigError: a quotation mark is never closed, or there is more than can be read.
        ResourceError: what reads the syntax is not installed.
    """
    reader = _Reader(text, name, open_text=open_text)
    given = known.get("@")
    state = ShellState(
        known=known,
        positional=None if given is None else [(word,) if word else () for word in _split(given)],
        values={key: (value,) if value else () for key, value in environment.items()},
        exported=dict.fromkeys(environment, Place(1, 1)),
    )
    reader.run(reader.root.children, state)
    return ShellScript(
        tuple(reader.commands), reader.files, tuple(reader.unset), dict(reader.sourced)
    )


@dataclass(frozen=True)
class ShellFunction:
    """The body of a function, and the reader of the text that it stands in."""

    reader: _Reader
    body: Any


class _Reader(AssignmentReader, BranchReader, RedirectReader):
    """Reads commands and functions, and by its bases all else."""

    def command(self, node: Any, state: ShellState) -> None:
        prefix: dict[str, Word] = {}
        words: list[Word] = []
        others: list[Any] = []
        within = (
            state.fork() if any(c.type == "variable_assignment" for c in node.children) else state
        )
        for child in node.children:
            if child.type == "variable_assignment":
                for variable, text in self.assignment(child, within).items():
                    prefix[variable] = word_of(text, self.expander.place(child))
            elif child.type in ("file_redirect", "herestring_redirect"):
                words += self.expander.words_of_nodes(others, state)
                words += self.after_redirect(child, state)
                others = []
            elif child.type != "comment":
                others.append(child)
        words += self.expander.words_of_nodes(others, state)
        self.start(words, prefix, state)

    def start(self, words: list[Word], prefix: dict[str, Word], state: ShellState) -> None:
        """One command with its words: those of the shell itself are followed, others are kept."""
        while words and (match := ASSIGNMENT.fullmatch(words[0].text)) and not prefix.get(match[1]):
            prefix[match[1]] = value_of(words[0])
            words = words[1:]
        if words and words[0].text in ("env", "export"):
            said, words = _split_assignments(words[1:], plain_words=words[0].text == "env")
            prefix |= said
        if not words:
            for variable, word in prefix.items():
                state.assign(variable, word.parts)
            self.keep((), prefix, state)
            return
        head = words[0].text
        if head in state.functions:
            self.call(state.functions[head], words, state)
        elif head == "eval" and len(words) > 1:
            self.text(words[1:], state)
        elif (at := _text_of_shell(words)) is not None:
            outer = replace(state, around=(*state.around, *words[: at[0]]))
            inner = outer.fork()
            for variable, word in prefix.items():
                inner.values[variable] = word.parts
            self.text([words[at[1]]], inner)
        elif not self.own_command(head, words, state):
            self.keep(tuple(words), prefix, state)

    def own_command(self, head: str, words: list[Word], state: ShellState) -> bool:
        """A command of the shell itself that changes what follows."""
        if head in _ENDS:
            state.ended = _ENDS[head]
        elif head == "cd":
            self.enter_folder(words, state)
            return False
        elif head in ("source", ".") and len(words) > 1:
            return self.take_in(words, state)
        elif head == "shift":
            count = words[1].text if len(words) > 1 else "1"
            if count.isdigit():
                state.shift(int(count))
        elif head == "set" and len(words) > 1 and words[1].text == "--":
            state.positional = [word.parts for word in words[2:]]
        elif head == "unset":
            for word in words[1:]:
                state.clear(word.text)
        elif head == "let":
            for word in words[1:]:
                if match := ASSIGNMENT.fullmatch(word.text):
                    value = self.expander.arithmetic(match[2], state, word.text)
                    state.assign(match[1], value)
        elif head == "read":
            for word in words[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", word.text):
                    state.assign(word.text, (Hole(word.text, f"${word.text}"),))
        else:
            return False
        return True

    def enter_folder(self, words: list[Word], state: ShellState) -> None:
        if len(words) > 1 and not words[1].open:
            target = PurePosixPath(words[1].text)
            base = PurePosixPath() if target.is_absolute() else PurePosixPath(state.folder)
            state.folder = str(base / target)

    def take_in(self, words: list[Word], state: ShellState) -> bool:
        """``source FILE``: its commands as if they stood here; whether it could be read."""
        name = words[1].text
        text = None
        if not words[1].open and self.open_text is not None and self.depth < DEEPEST:
            text = self.open_text(name, state.folder)
        self.sourced[name] = False
        if text is None:
            return False
        try:
            inner = _Reader(text, name, outer=self)
        except ConfigError:  # not this shell's: what it sets is not known
            return False
        self.sourced[name] = True
        outer = state.positional
        if len(words) > 2:
            state.positional = [word.parts for word in words[2:]]
        self.follow(inner, words[0].place, state)
        state.positional = outer
        if state.ended == "return":
            state.ended = ""
        return True

    def follow(self, inner: _Reader, place: Place, state: ShellState) -> None:
        """Reads another text in this one's state; its commands stand at ``place``."""
        inner.depth = self.depth + 1
        first = len(self.commands)
        inner.run(inner.root.children, state)
        self.move(first, place)

    def move(self, first: int, place: Place) -> None:
        """Commands from the ``first`` on stand in another text: here they stand at ``place``."""
        for at in range(first, len(self.commands)):
            found = self.commands[at]
            moved = tuple(replace(word, place=place) for word in found.words)
            self.commands[at] = replace(found, words=moved)

    def call(self, function: ShellFunction, words: list[Word], state: ShellState) -> None:
        outer, shifted = state.positional, state.shifted
        if [word.is_all_arguments for word in words[1:]] != [True]:  # else they are the file's own
            given = [word for word in words[1:] if not word.is_all_arguments]
            state.positional = [word.parts for word in given]
        reader, first = function.reader, len(self.commands)
        reader.depth, kept = self.depth, reader.depth
        reader.statement(function.body, state)
        reader.depth = kept
        if reader is not self:
            self.move(first, words[0].place)
        state.positional, state.shifted = outer, shifted
        if state.ended == "return":
            state.ended = ""

    def text(self, words: Sequence[Word], state: ShellState) -> None:
        """Text that a shell reads as commands once more: ``eval``, ``bash -c``."""
        pieces: list[str] = []
        for number, word in enumerate(words):
            for part in word.parts:
                if isinstance(part, Hole):
                    variable = f"_hole_{self.counted[0]}_{number}_{len(pieces)}"
                    state.values[variable] = (part,)
                    pieces.append(f"${{{variable}}}")
                else:
                    pieces.append(part)
            pieces.append(" ")
        try:
            inner = _Reader("".join(pieces), self.name, outer=self)
        except ConfigError:
            return  # an odd quotation mark in what eval would read: no command to find
        self.follow(inner, words[0].place, state)

    def define(self, node: Any, state: ShellState) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            state.functions[text_of_node(name)] = ShellFunction(self, body)


_Reader.handlers = {
    "command": _Reader.command,
    "variable_assignment": _Reader.assign,
    "declaration_command": _Reader.declare,
    "if_statement": _Reader.choose,
    "case_statement": _Reader.choose_case,
    "for_statement": _Reader.repeat,
    "c_style_for_statement": _Reader.repeat_counted,
    "while_statement": _Reader.loop,
    "function_definition": _Reader.define,
    "subshell": _Reader.within,
    "list": _Reader.chain,
    "redirected_statement": _Reader.redirect,
    "pipeline": _Reader.pipe,
    "unset_command": _Reader.unset_variables,
    "test_command": lambda reader, node, state: None,
}


def _split(text: str) -> list[str]:
    """The words of a text, as a shell has them; between blanks where it has none."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _split_assignments(
    words: Sequence[Word], *, plain_words: bool
) -> tuple[dict[str, Word], list[Word]]:
    """``NAME=VALUE`` at the front of what ``env`` is given, and the command behind them."""
    said: dict[str, Word] = {}
    for at, word in enumerate(words):
        match = ASSIGNMENT.fullmatch(word.text)
        if match:
            said[match[1]] = value_of(word)
        elif plain_words and not word.text.startswith("-"):
            return said, list(words[at:])
    return said, []


def _text_of_shell(words: Sequence[Word]) -> tuple[int, int] | None:
    """Where ``bash -c TEXT`` stands: of the shell, and of the text."""
    for at, word in enumerate(words[:-2]):
        if PurePosixPath(word.text).name in _SHELLS:
            for after in range(at + 1, min(at + 4, len(words) - 1)):
                if re.fullmatch(r"-[a-z]*c", words[after].text):
                    return at, after + 1
    return None
