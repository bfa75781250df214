"""A shell's text as far as a launch line needs it: words with places, assignments, no execution."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.nodes import Place

_ENDS = re.compile(r"&&|\|\||[;|&\n]")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SUBSTITUTED = re.compile(r"\$\(|`")


@dataclass(frozen=True)
class Word:
    """One word. ``open`` is the part that only a shell could tell: ``$NP``, ``$(nproc)``."""

    text: str
    place: Place
    open: str = ""


@dataclass(frozen=True)
class Command:
    """Words up to the end of a command, and the assignments that stand before them."""

    words: tuple[Word, ...]
    variables: Mapping[str, Word] = field(default_factory=dict)


def commands(text: str, *, name: str, known: Mapping[str, str]) -> Iterator[Command]:
    """Every command of ``text``; ``known`` are values of variables that the user gives.

    A variable that the text itself sets has that value from there on.

    Raises:
        ConfigError: a quotation mark is never closed.
    """
    values = dict(known)
    for words in _split(text, name):
        variables: dict[str, Word] = {}
        rest = [_expand(raw, place, values) for raw, place in words]
        while rest and (match := _ASSIGNMENT.fullmatch(rest[0].text)):
            variables[match[1]] = Word(match[2], rest[0].place, rest[0].open)
            rest = rest[1:]
        if rest and rest[0].text in ("export", "env"):
            found = [(_ASSIGNMENT.fullmatch(word.text), word) for word in rest[1:]]
            said = {m[1]: Word(m[2], word.place, word.open) for m, word in found if m}
            variables |= said
            rest = [word for m, word in found if not m]
        if not rest:  # what stands before a command is that command's alone
            values |= {
                key: word.text
                for key, word in variables.items()
                if not word.open and key not in known
            }
        yield Command(tuple(rest), variables)


def _split(text: str, name: str) -> Iterator[list[tuple[str, Place]]]:
    """The raw words of each command, quotation marks still in them."""
    words: list[tuple[str, Place]] = []
    at, line, start = 0, 1, 0
    while at < len(text):
        character = text[at]
        if text.startswith("\\\n", at):
            at, line, start = at + 2, line + 1, at + 2
        elif match := _ENDS.match(text, at):
            if words:
                yield words
            words = []
            if match[0] == "\n":
                line, start = line + 1, at + 1
            at = match.end()
        elif character.isspace():
            at += 1
        elif character == "#":
            at = (text.find("\n", at) + len(text) + 1) % (len(text) + 1)
        else:
            place = Place(line, at - start + 1)
            end = _end_of_word(text, at, name, place)
            raw = text[at:end]
            words.append((raw, place))
            if "\n" in raw:
                line += raw.count("\n")
                start = at + raw.rindex("\n") + 1
            at = end
    if words:
        yield words


def _end_of_word(text: str, at: int, name: str, place: Place) -> int:
    quote, depth = "", 0
    while at < len(text):
        character = text[at]
        if character == "\\" and quote != "'":
            if not quote and text.startswith("\\\n", at):
                return at
            at += 2
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"`":
            quote = character
        elif text.startswith("$(", at) or (depth and character == "("):
            depth += 1
            at += text.startswith("$(", at)
        elif depth and character == ")":
            depth -= 1
        elif not depth and (character.isspace() or character in ";|&"):
            return at
        at += 1
    if quote:
        raise ConfigError(
            f"{name}:{place}: a quotation mark {quote} that nothing closes",
            fix="close it",
            line=place.line,
            column=place.column,
        )
    return len(text)


def _expand(raw: str, place: Place, values: Mapping[str, str]) -> Word:
    """Without its quotation marks, and with variables replaced by what they are."""
    text, opened = "", ""
    for part in re.findall(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^'\"\\]+|.", raw, re.DOTALL):
        if part[0] == "'" and len(part) > 1:
            text += part[1:-1]
            continue
        if part[0] == "\\":
            text += part[1:]
            continue
        inner = part[1:-1] if part[0] == '"' and len(part) > 1 else part
        replaced, missing = _with_values(inner, values)
        text += replaced
        opened = opened or missing
    return Word(text, place, opened)


def _with_values(text: str, values: Mapping[str, str]) -> tuple[str, str]:
    missing = ""

    def value(match: re.Match[str]) -> str:
        nonlocal missing
        name = match[1] or match[2]
        if name in values:
            return values[name]
        if match[3] is not None:
            return match[3]
        missing = missing or name
        return match[0]

    if _SUBSTITUTED.search(text):
        return text, text
    return _VARIABLE.sub(value, text), missing
