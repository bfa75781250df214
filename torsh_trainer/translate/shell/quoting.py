"""Quotation marks within ``${name:-...}``: what a shell makes of them there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_OPENING = {"(": ")", "{": "}"}
_IN_QUOTES = '$`"\\\n'


class Token(NamedTuple):
    """A part of such a word: plain text, or an expansion as it is written; and whether quotation
    marks protect it from being split."""

    text: str
    is_expansion: bool
    quoted: bool


def list_tokens(raw: str, *, in_quotes: bool) -> Iterator[Token]:
    """The parts of what stands behind ``:-``. ``in_quotes``: all of the expansion stands in ``"``,
    where ``'`` is a letter, and nothing is split.

    Raises:
        ValueError: a quotation mark or a bracket is never closed.
    """
    at, within = 0, False
    while at < len(raw):
        letter = raw[at]
        quoted = in_quotes or within
        if letter == '"':
            within = not within
            if within and not in_quotes:
                yield Token("", False, True)  # an empty word is a word
            at += 1
        elif letter == "'" and not quoted:
            end = raw.index("'", at + 1)
            yield Token(raw[at + 1 : end], False, True)
            at = end + 1
        elif letter == "\\" and at + 1 < len(raw):
            following = raw[at + 1]
            if following != "\n":
                kept = quoted and following not in _IN_QUOTES and following != "}"
                yield Token(f"\\{following}" if kept else following, False, True)
            at += 2
        elif letter in "$`":
            end = _find_end(raw, at)
            yield Token(raw[at:end], end > at + 1, quoted)
            at = end
        else:
            yield Token(letter, False, quoted)
            at += 1
    if within:
        raise ValueError("a quotation mark that nothing closes")


def _find_end(raw: str, start: int) -> int:
    """Where the expansion that begins at ``start`` ends; of a ``$`` alone right behind it."""
    if raw[start] == "`":
        return raw.index("`", start + 1) + 1
    at = start + 1
    if at == len(raw):
        return at
    if raw[at] == "'":
        return raw.index("'", at + 1) + 1
    if raw[at] in _OPENING:
        return _skip_bracket(raw, at)
    if raw[at] in "@*#?$!-" or raw[at].isdigit():
        return at + 1
    while at < len(raw) and (raw[at].isalnum() or raw[at] == "_"):
        at += 1
    return at


def _skip_bracket(raw: str, start: int) -> int:
    """Behind the bracket that closes the one at ``start``, past quotation marks within."""
    waiting = [_OPENING[raw[start]]]
    at, within = start + 1, False
    while waiting:
        if at >= len(raw):
            raise ValueError("a bracket that nothing closes")
        letter = raw[at]
        if letter == "\\":
            at += 1
        elif letter == '"':
            within = not within
        elif letter == "'" and not within:
            at = raw.index("'", at + 1)
        elif letter == waiting[-1]:
            waiting.pop()
        elif letter in _OPENING and (letter == "(" or raw[at - 1] == "$"):
            waiting.append(_OPENING[letter])
        at += 1
    return at
