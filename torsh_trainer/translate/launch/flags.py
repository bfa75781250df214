"""Tables of flags with a verdict for each, and how a launcher reads its part of a line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torsh_trainer.errors import nearest
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.outcomes import Outcome
from torsh_trainer.translate.plan import Verdict
from torsh_trainer.translate.shell.words import Hole, Word

if TYPE_CHECKING:
    from torsh_trainer.translate.launch.job import LaunchJob

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class StatedFlag:
    """A flag as it was written, or a key of a launcher's YAML (``file`` says which).

    ``values`` is empty for a flag that stands alone; ``known_as`` is the flag that an abbreviation
    stands for.
    """

    key: str
    values: tuple[Word, ...]
    place: Place
    file: str = ""
    known_as: str = ""

    @property
    def text(self) -> str:
        """Its value; ``true`` where it stands alone."""
        return " ".join(word.text for word in self.values) if self.values else "true"

    @property
    def name(self) -> str:
        """Without dashes at its front, and with ``_`` within."""
        return (self.known_as or self.key).lstrip("-").replace("-", "_")

    @property
    def hole(self) -> Hole | None:
        """What of its value only a shell could tell."""
        return next((hole for word in self.values for hole in word.holes), None)

    @property
    def is_empty(self) -> bool:
        """Its value is an empty word, as in ``--deepspeed "$NOTHING"``."""
        return bool(self.values) and self.hole is None and not self.text

    @property
    def is_on(self) -> bool:
        """It stands alone, or says yes."""
        return self.text.lower() in ("true", "1", "yes", "y", "t", "on")


Judge = Callable[["LaunchJob", StatedFlag], Outcome]


@dataclass(frozen=True)
class FlagRow:
    """One flag: its names, how many words follow it, and what it comes to.

    ``rule`` is the name in the report.
    """

    names: tuple[str, ...]
    takes: int
    judge: Judge
    rule: str


FlagTable = Mapping[str, FlagRow]
"""Every name of every flag -> its row."""


def table_of_rows(*rows: FlagRow) -> FlagTable:
    """The rows by each of their names."""
    found: dict[str, FlagRow] = {}
    for row in rows:
        for name in row.names:
            assert re.fullmatch(r"-{1,2}[A-Za-z0-9][\w-]*(?<!-)", name), name
            assert name not in found, name
            found[name] = row
    return found


def judge_row(names: str, judge: Judge, *, takes: int = 1, rule: str) -> FlagRow:
    """A row whose verdict hangs on the value or on the job; ``names`` apart by blanks."""
    return FlagRow(tuple(names.split()), takes, judge, rule)


def fix_row(names: str, verdict: Verdict, why: str, *, takes: int = 1, rule: str) -> FlagRow:
    """A row whose verdict hangs on nothing."""
    return FlagRow(tuple(names.split()), takes, lambda job, said: Outcome(verdict, why), rule)


def fix_rows(names: str, verdict: Verdict, why: str, *, takes: int = 1, rule: str) -> list[FlagRow]:
    """A row for each of several flags of one verdict."""
    return [fix_row(name, verdict, why, takes=takes, rule=rule) for name in names.split()]


@dataclass(frozen=True)
class FlagProblem:
    """What a launcher would not take: ``what`` is wrong at ``place``, and ``fix``."""

    place: Place
    what: str
    fix: str


def read_flags(
    words: Sequence[Word], table: FlagTable, *, launcher: str, folds_dashes: bool = False
) -> tuple[list[StatedFlag], list[FlagProblem], int]:
    """The flags at the front of ``words``, what is wrong with them, and where they end.

    ``folds_dashes``: the launcher takes ``-`` for ``_`` within a name. A word that only a shell
    could tell, with more flags behind it, is returned as a flag of its own name.
    """
    said: list[StatedFlag] = []
    problems: list[FlagProblem] = []
    at = 0
    while at < len(words):
        word = words[at]
        if _is_more_flags(words, at):
            said.append(StatedFlag(word.text, (word,), word.place))
            at += 1
            continue
        if not word.text.startswith("-") or word.text == "-":
            break
        if word.text == "--":
            at += 1
            break
        name, equals, inline = word.text.partition("=")
        row = find_row(name, table, folds_dashes=folds_dashes)
        if row is None and (attached := _split_short(word, table)) is not None:
            short, value = attached
            said.append(StatedFlag(short, (value,), word.place))
            at += 1
            continue
        if row is None:
            fix = nearest(name, [n for n in table if n.startswith("--")])
            problems.append(FlagProblem(word.place, f"{launcher} has no option {name}", fix))
            at += 1
            continue
        if equals:
            values: tuple[Word, ...] = (Word(inline, word.place, word.open, word.holes),)
            at += 1
        else:
            values = tuple(words[at + 1 : at + 1 + row.takes])
            at += 1 + row.takes
            if len(values) < row.takes:
                problems.append(FlagProblem(word.place, f"{name} wants a value", "add it"))
        said.append(StatedFlag(name, values, word.place, known_as=row.names[-1]))
    return said, problems, min(at, len(words))


def find_row(name: str, table: FlagTable, *, folds_dashes: bool = False) -> FlagRow | None:
    """The row of that name, or of which it is the only beginning, as argparse has it."""
    if name in table:
        return table[name]
    if folds_dashes:
        folded = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        if folded in table:
            return table[folded]
        name = folded
    if not name.startswith("--") or len(name) < 4:
        return None
    rows = {id(row): row for known, row in table.items() if known.startswith(name)}
    return next(iter(rows.values())) if len(rows) == 1 else None


def _split_short(word: Word, table: FlagTable) -> tuple[str, Word] | None:
    """``-N2``: a short flag with its value in the same word."""
    short = word.text[:2]
    if word.text.startswith("--") or short not in table or len(word.text) < 3:
        return None
    if table[short].takes != 1:
        return None
    return short, Word(word.text[2:], word.place, word.open, word.holes)


def _is_more_flags(words: Sequence[Word], at: int) -> bool:
    """A word that only a shell could tell, and with a flag or a script right behind it."""
    word = words[at]
    if not word.open or not word.text.startswith("$") or word.text.endswith((".py", "/")):
        return False
    if at + 1 == len(words):
        return False
    following = words[at + 1].text
    return following.endswith(".py") or any(w.text.endswith(".py") for w in words[at + 1 :][:12])
