"""What comes from files of others: told in words, kept within bounds, printed as plain text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torsh_trainer.errors import ConfigError

_LONGEST_WORD = 400
_LONGEST_LINE = 4000
_MOST_CONTAINERS = 500_000

_ODD = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextlib.contextmanager
def in_words(name: object, kind: str) -> Iterator[None]:
    """Within the block, what the content of ``name`` makes Python raise is said in a sentence.

    Raises:
        ConfigError: ``name`` is not laid out as ``kind`` is.
    """
    try:
        yield
    except _ODD as error:
        what = "a part of it is of another type or size"
        if isinstance(error, KeyError) and error.args:
            what = f"it has no {shorten(str(error.args[0]), 80)!r} where one belongs"
        raise ConfigError(
            f"{name} is not laid out as {kind}: {what}",
            fix="copy it again, or save it once more; debug=true shows where reading it ended",
        ) from error


def check_nest(content: Any, name: object) -> None:
    """Refuses dicts and lists that hold themselves, or repeat each other without end.

    Raises:
        ConfigError: walking over them would take for ever.
    """
    found, count = [content], 0
    while found:
        value = found.pop()
        below = value.values() if isinstance(value, Mapping) else value
        if isinstance(value, Mapping | list | tuple):
            count += 1
            found += [item for item in below if isinstance(item, Mapping | list | tuple)]
        if count > _MOST_CONTAINERS:
            raise ConfigError(
                f"{name} holds itself, or more than {_MOST_CONTAINERS:,} dicts and lists",
                fix="save plain state_dicts",
            )


def escape_controls(text: str) -> str:
    """``text`` without what moves a terminal's cursor or colours it: ``\\x1b`` in words."""
    return "".join(c if c.isprintable() or c == "\n" else _escape_character(c) for c in text)


def readable(text: str) -> str:
    """``text`` for a terminal: ``escape_controls``, and words and lines without end are cut."""
    text = escape_controls(text)
    text = re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda m: shorten(m[0], _LONGEST_WORD), text)
    if len(text) <= _LONGEST_LINE:
        return text
    return "\n".join(shorten(line, _LONGEST_LINE) for line in text.split("\n"))


def _escape_character(character: str) -> str:
    number = ord(character)
    if number < 0x20:
        return "    " if character == "\t" else f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, its middle left out where it is longer."""
    if len(text) <= width:
        return text
    left = (width - 3) // 2
    return f"{text[:left]}...{text[len(text) - (width - 3 - left) :]}"
