"""What a reader of shell knows of a word: text, and holes where only a shell could tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torsh_trainer.translate.nodes import Place

GPUS = "gpus"
"""``Hole.means``: the number of GPUs of the machine."""


@dataclass(frozen=True)
class Hole:
    """What only a shell could tell: ``$NP``, ``$(nproc)``.

    ``name`` is what a user states for it (``NP``), or all of its text where it has no name.
    ``choices`` are the values of the branches of an ``if`` that cannot be decided.
    """

    name: str
    text: str
    choices: tuple[str, ...] = ()
    means: str = ""


Text = tuple["str | Hole", ...]
"""Text with holes."""


@dataclass(frozen=True)
class Word:
    """One word. ``open`` is the name of its first hole, empty where all of it is known."""

    text: str
    place: Place
    open: str = ""
    holes: tuple[Hole, ...] = ()

    @property
    def is_all_arguments(self) -> bool:
        """It is ``$@``, the arguments of the file, which nobody has given."""
        return (
            len(self.holes) == 1 and self.holes[0].name == "@" and self.holes[0].text == self.text
        )

    @property
    def parts(self) -> Text:
        """The text of the word with its holes."""
        parts: list[str | Hole] = []
        rest = self.text
        for hole in self.holes:
            before, _, rest = rest.partition(hole.text)
            parts += [before, hole]
        return merge_parts([*parts, rest])


@dataclass(frozen=True)
class Command:
    """One command as it would run, or an assignment (no words).

    ``variables`` stand before the command, or are what is assigned; ``exported`` is what the shell
    has exported by then. ``conditions`` are what nobody can decide and has to hold, ``rounds`` the
    loops around it: variable and value, which is empty where only a shell could tell. ``around``
    are the words before ``bash -c``. ``folder`` is where it runs, from where the file was started,
    empty where nothing changed it.
    """

    words: tuple[Word, ...]
    variables: Mapping[str, Word] = field(default_factory=dict)
    exported: Mapping[str, Word] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    rounds: tuple[tuple[str, str], ...] = ()
    around: tuple[Word, ...] = ()
    folder: str = ""


@dataclass(frozen=True)
class WrittenFile:
    """A file that the shell file writes: its text; None where ``by`` makes it, which is not run."""

    text: Text | None
    place: Place
    by: str


def word_of(text: Text, place: Place) -> Word:
    """``text`` as a word at ``place``."""
    holes = tuple(part for part in text if isinstance(part, Hole))
    return Word(plain(text), place, holes[0].name if holes else "", holes)


def plain(text: Text) -> str:
    """The text, holes as they are written."""
    return "".join(part if isinstance(part, str) else part.text for part in text)


def text_if_known(text: Text) -> str | None:
    """The text, or None where it has a hole."""
    return None if any(isinstance(part, Hole) for part in text) else plain(text)


def merge_parts(parts: Iterable[str | Hole]) -> Text:
    """Neighbouring strings as one, empty ones left out."""
    merged: list[str | Hole] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part != "":
            merged.append(part)
    return tuple(merged)


def split_words(pieces: Sequence[tuple[Text, bool]]) -> list[Text]:
    """Pieces (text, quoted) of one word as the words that a shell makes of it."""
    words: list[list[str | Hole]] = []
    current: list[str | Hole] | None = None
    for text, quoted in pieces:
        if quoted:
            current = [] if current is None else current
            current.extend(text)
            continue
        for part in text:
            if isinstance(part, Hole):
                current = [] if current is None else current
                current.append(part)
                continue
            for field_ in re.split(r"([ \t\n]+)", part):
                if not field_:
                    continue
                if field_.isspace():
                    if current is not None:
                        words.append(current)
                    current = None
                else:
                    current = [] if current is None else current
                    current.append(field_)
    if current is not None:
        words.append(current)
    return [merge_parts(word) for word in words]
