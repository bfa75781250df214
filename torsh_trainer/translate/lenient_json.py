"""JSON as DeepSpeed reads it (the syntax of Hjson), with the place of every key and value.

DeepSpeed loads its file with the package ``hjson``: comments (``#``, ``//``, ``/* */``), keys and
texts without quotes, commas where one likes, an object without braces. That package keeps no
places, and a report has to name lines; see the decision record on reading. The syntax is that of
https://hjson.github.io/syntax.html as hjson-py 3.1.0 implements it, to which the tests hold this.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.nodes import MappingEntry, Node, Place

DEEPEST = 64
"""Objects and lists within one another; DeepSpeed's own files reach 9."""

_PUNCTUATION = "{}[],:"
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?$")
_SKIP = re.compile(r"(?:[ \t\n\r]+|#[^\r\n]*|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTELESS_END = re.compile(r"[\r\n,}\]#]|//|/\*|\Z")
_STRING_PART = re.compile(r"[^'\"\\\x00-\x1f]*")
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"} | {c: c for c in "\"'\\/"}
_WORDS = {"true": True, "false": False, "null": None}


def parse(text: str, *, name: str) -> Node:
    """The object that ``text`` holds; ``name`` is the file's, for messages.

    Raises:
        ConfigError: it is not JSON, not even leniently read; a key stands twice; too deep.
    """
    return _Reader(text, name).document()


@dataclass
class _Reader:
    text: str
    name: str

    def __post_init__(self) -> None:
        self._starts = [0, *(m.end() for m in re.finditer(r"\r\n|\n|\r", self.text))]

    def place(self, at: int) -> Place:
        line = bisect_right(self._starts, at)
        return Place(line, at - self._starts[line - 1] + 1)

    def wrong(self, what: str, at: int, fix: str = "correct the file there") -> ConfigError:
        place = self.place(min(at, len(self.text)))
        return ConfigError(
            f"{self.name}:{place}: {what}", fix=fix, line=place.line, column=place.column
        )

    def document(self) -> Node:
        at = self.skip(1 if self.text.startswith("\ufeff") else 0)
        if at == len(self.text):
            return Node({}, self.place(at))
        if self.text[at] in "{[":
            node, at = self.value(at, 0)
        else:
            node, at = self.braceless(at)
        at = self.skip(at)
        if at != len(self.text):
            raise self.wrong(f"more text after the end of the object: {self.glimpse(at)}", at)
        if not node.is_mapping:
            raise self.wrong("the file holds no object", at, "its outermost part is {...}")
        return node

    def braceless(self, at: int) -> tuple[Node, int]:
        return self.mapping(at, at, 1, closing="")

    def skip(self, at: int) -> int:
        match = _SKIP.match(self.text, at)
        assert match is not None
        if self.text.startswith("/*", match.end()):
            raise self.wrong("a comment /* has no end", match.end())
        return match.end()

    def glimpse(self, at: int) -> str:
        return repr(self.text[at : at + 20].splitlines()[0]) if at < len(self.text) else "the end"

    def value(self, at: int, depth: int) -> tuple[Node, int]:
        if depth > DEEPEST:
            raise self.wrong(
                f"nested deeper than {DEEPEST} levels", at, "no DeepSpeed file is so deep"
            )
        here = self.text[at : at + 1]
        if here == "{":
            return self.mapping(at, at + 1, depth + 1, closing="}")
        if here == "[":
            return self.sequence(at, depth + 1)
        if self.text.startswith("'''", at):
            text, end = self.multiline(at)
            return Node(text, self.place(at)), end
        if here in ("'", '"'):
            text, end = self.read_quoted(at)
            return Node(text, self.place(at)), end
        return self.quoteless(at)

    def mapping(self, start: int, at: int, depth: int, *, closing: str) -> tuple[Node, int]:
        entries: dict[str, MappingEntry] = {}
        at = self.skip(at)
        while not (closing and self.text[at : at + 1] == closing):
            if at == len(self.text):
                if not closing:
                    break
                raise self.wrong(
                    f"the file ends within the object that line {self.place(start).line} opens",
                    at,
                    "is a closing brace missing?",
                )
            key_at = at
            key, at = self.key(at)
            at = self.skip(at)
            if self.text[at : at + 1] != ":":
                raise self.wrong(f"a colon should follow the key {key!r}", at)
            node, at = self.value(self.skip(at + 1), depth)
            if key in entries:
                first = entries[key].place
                raise self.wrong(
                    f"the key {key!r} stands twice, first in line {first.line}",
                    key_at,
                    "remove one: DeepSpeed refuses duplicates",
                )
            entries[key] = MappingEntry(self.place(key_at), node)
            at = self.comma(at)
        return Node(entries, self.place(start)), at + len(closing)

    def sequence(self, start: int, depth: int) -> tuple[Node, int]:
        items = []
        at = self.skip(start + 1)
        while self.text[at : at + 1] != "]":
            if at == len(self.text):
                opened = self.place(start).line
                raise self.wrong(f"the file ends within the list that line {opened} opens", at)
            node, at = self.value(at, depth)
            items.append(node)
            at = self.comma(at)
        return Node(items, self.place(start)), at + 1

    def comma(self, at: int) -> int:
        at = self.skip(at)
        return self.skip(at + 1) if self.text[at : at + 1] == "," else at

    def key(self, at: int) -> tuple[str, int]:
        if self.text[at] in "'\"":
            return self.read_quoted(at)
        match = re.compile(r"[^\s{}\[\],:]*").match(self.text, at)
        assert match is not None
        end = match.end()
        following = re.compile(r"\s*").match(self.text, end)
        assert following is not None
        if match.group() and self.text[following.end() : following.end() + 1] == ":":
            return match.group(), end
        raise self.wrong(
            f"a key should stand here, not {self.glimpse(at)}",
            at if not match.group() else end,
            "a key with spaces or punctuation wants quotes",
        )

    def quoteless(self, at: int) -> tuple[Node, int]:
        if self.text[at : at + 1] in (*_PUNCTUATION, ""):
            raise self.wrong(f"a value should stand here, not {self.glimpse(at)}", at)
        end_match = _QUOTELESS_END.search(self.text, at)
        while end_match is not None:
            end = end_match.start()
            word = self.text[at:end].strip()
            if word in _WORDS:
                return Node(_WORDS[word], self.place(at)), end
            number = _NUMBER.match(word)
            if number is not None:
                return Node(self.number(number, at), self.place(at)), end
            if self.text[end : end + 1] in ("", "\r", "\n"):
                return Node(word, self.place(at), bare=True), end
            end_match = _QUOTELESS_END.search(self.text, end + 1)
        raise AssertionError("the search ends at the end of the text at the latest")

    def number(self, match: re.Match[str], at: int) -> int | float:
        whole, fraction, exponent = match.groups()
        if len(match.group()) > 400:
            raise self.wrong("a number of more than 400 digits", at)
        if not (fraction or exponent):
            return int(whole)
        number = float(match.group())
        if abs(number) == float("inf"):
            raise self.wrong(f"{match.group()} is beyond the range of numbers", at)
        # hjson's own rule: what is whole and not huge is an integer.
        return int(number) if number == int(number) and abs(number) < 1e10 else number

    def read_quoted(self, start: int) -> tuple[str, int]:
        quote, at, parts = self.text[start], start + 1, []
        while True:
            match = _STRING_PART.match(self.text, at)
            assert match is not None
            parts.append(match.group())
            at = match.end()
            stop = self.text[at : at + 1]
            if stop == quote:
                return "".join(parts), at + 1
            if stop in ("'", '"') and stop:
                parts.append(stop)
                at += 1
            elif stop == "\\":
                part, at = self.escape(at)
                parts.append(part)
            else:
                raise self.wrong("a text in quotes has no end on its line", start)

    def escape(self, at: int) -> tuple[str, int]:
        letter = self.text[at + 1 : at + 2]
        if letter in _ESCAPES and letter:
            return _ESCAPES[letter], at + 2
        if letter == "u":
            code, end = self.unit(at)
            if 0xD800 <= code < 0xDC00 and self.text.startswith("\\u", end):
                low, low_end = self.unit(end)
                if 0xDC00 <= low < 0xE000:
                    return chr(0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00))), low_end
            return chr(code), end
        raise self.wrong(f"no escape sequence: \\{letter}", at)

    def unit(self, at: int) -> tuple[int, int]:
        digits = self.text[at + 2 : at + 6]
        if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise self.wrong("\\u wants four hexadecimal digits", at)
        return int(digits, 16), at + 6

    def multiline(self, start: int) -> tuple[str, int]:
        """A text between ''' and ''', less the indentation of its opening."""
        indent = self.place(start).column - 1
        end = self.text.find("'''", start + 3)
        if end < 0:
            raise self.wrong("a text that ''' opens has no end", start)
        first, *rest = self.text[start + 3 : end].replace("\r", "").split("\n")
        lines = [first.lstrip(" \t")] if first.strip(" \t") or not rest else []
        for line in rest:
            blank = len(line) - len(line.lstrip(" \t"))
            lines.append(line[min(blank, indent) :])
        text = "\n".join(lines)
        return text.removesuffix("\n"), end + 3
