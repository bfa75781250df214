"""A shell script for the rules: its commands as they would run, and the lines of a scheduler."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from torsh_trainer.doctor.script.base import ScriptPiece
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.launch.job import LaunchLine, Link
from torsh_trainer.translate.launch.lines import read_line
from torsh_trainer.translate.shell.script import ShellScript, read_script
from torsh_trainer.translate.shell.words import Command, Word

_DIRECTIVE = re.compile(r"^\s*#(SBATCH|PBS|BSUB)\s+(.*)")
_SHORT = {
    "-N": "nodes",
    "-n": "ntasks",
    "-c": "cpus-per-task",
    "-o": "output",
    "-e": "error",
    "-G": "gpus",
}
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Directive:
    """A line of a scheduler: ``#SBATCH --nodes=4`` is (``SBATCH``, ``nodes``, ``4``)."""

    scheduler: str
    name: str
    value: str
    line: int


@dataclass(frozen=True)
class StartedCommand:
    """A command that starts something: its line, words, and the variables that it gets.

    ``remote`` says that ssh takes it to another host.
    """

    line: int
    command: Command
    variables: Mapping[str, Word]
    remote: bool = False

    @property
    def words(self) -> list[str]:
        """Its words, holes as they are written."""
        return [word.text for word in self.command.words]

    @property
    def launch(self) -> LaunchLine | None:
        """The launchers in it."""
        return read_line(self.command)

    def link(self, *names: str) -> Link | None:
        """The launcher of one of these names in it."""
        launch = self.launch
        links = launch.links if launch is not None else ()
        return next((link for link in links if link.launcher in names), None)

    @property
    def inner(self) -> Link | None:
        """torchrun or the like, which starts several processes of this host."""
        return self.link(*_LAUNCHERS)


@lru_cache(maxsize=32)
def read_shell(piece: ScriptPiece) -> ShellScript | ConfigError:
    """What the script comes to, or why it cannot be read.

    Raises:
        ResourceError: what reads the syntax is not installed.
    """
    try:
        return read_script(piece.text, name=piece.file, known={})
    except ConfigError as error:
        return error


def why_unread(piece: ScriptPiece) -> str:
    """Why the script was not read, where that is no mistake of a whole file; else empty.

    Raises:
        ResourceError: what reads the syntax is not installed.
    """
    script = read_shell(piece)
    if not isinstance(script, ConfigError) or is_open_quote(piece, script):
        return ""
    return re.sub(r"^[\d: ]+", "", script.sentence.removeprefix(f"{piece.file}:"))


def is_open_quote(piece: ScriptPiece, error: ConfigError) -> bool:
    """A quotation mark of a whole file that nothing closes: no shell reads it either."""
    return piece.is_whole and "line" in error.facts


def commands_of(piece: ScriptPiece) -> Iterator[StartedCommand]:
    """Every command of the script, and those that it sends to other hosts by ssh."""
    script = read_shell(piece)
    if isinstance(script, ConfigError):
        return
    for command in script.commands:
        if not command.words:
            continue
        line = command.words[0].place.line
        yield StartedCommand(line, command, {**command.exported, **command.variables})
        if command.words[0].text == "ssh":
            yield from _read_ssh(command, line, piece.file)


def assignments_of(piece: ScriptPiece) -> Iterator[tuple[str, Word, int]]:
    """(variable, value, line) of every assignment, in order."""
    script = read_shell(piece)
    for command in () if isinstance(script, ConfigError) else script.commands:
        for name, word in command.variables.items():
            yield name, word, word.place.line


def directives_of(piece: ScriptPiece) -> list[Directive]:
    """The lines of a scheduler that it reads: those before the first command."""
    found: list[Directive] = []
    for number, line in piece.lines():
        if not line.lstrip().startswith("#"):
            break
        found += _read_directive(line, number)
    return found


def late_directives_of(piece: ScriptPiece) -> list[Directive]:
    """Those behind the first command, which a scheduler does not read."""
    found: list[Directive] = []
    started = False
    for number, line in piece.lines():
        started = started or not line.lstrip().startswith("#")
        if started:
            found += _read_directive(line, number)
    return found


def find_directive(piece: ScriptPiece, *names: str) -> Directive | None:
    """The last line of one of these names that the scheduler reads."""
    return next((one for one in reversed(directives_of(piece)) if one.name in names), None)


def number_of(text: str) -> int | None:
    """``4``; None for anything that only a shell could tell."""
    return int(text) if text.isascii() and text.isdigit() else None


def flag_number(link: Link | None, *names: str) -> int | None:
    """The number that a launcher was told by a flag."""
    said = link.find(*names) if link is not None else None
    return number_of(said.text) if said is not None else None


def _read_directive(line: str, number: int) -> Iterator[Directive]:
    match = _DIRECTIVE.match(line)
    if match is None:
        return
    try:
        words = shlex.split(match[2], comments=True)
    except ValueError:
        words = match[2].split()
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if not name.startswith("-"):
            continue
        short = name[:2] if not name.startswith("--") else ""
        if short and len(name) > 2 and match[1] == "SBATCH":
            name, value, equals = short, name[2:], "="
        if not equals and at < len(words) and not words[at].startswith("-"):
            value, at = words[at], at + 1
        yield Directive(match[1], _SHORT.get(name, name.lstrip("-")), value, number)


def _read_ssh(command: Command, line: int, name: str) -> Iterator[StartedCommand]:
    """The commands in the last words of ``ssh HOST WORDS``."""
    words = list(command.words[1:])
    while words and words[0].text.startswith("-"):
        takes = words[0].text in ("-i", "-p", "-l", "-o", "-F", "-J")
        words = words[2 if takes else 1 :]
    text = " ".join(word.text for word in words[1:])
    if not text.strip():
        return
    try:
        inner = read_script(text, name=name, known={})
    except ConfigError:
        return
    for sent in inner.commands:
        if sent.words:
            yield StartedCommand(line, sent, {**sent.exported, **sent.variables}, remote=True)
