"""Words of the syntax tree as a shell would expand them, with holes where only it could tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.shell.arithmetic import compute
from torsh_trainer.translate.shell.grammar import parse, place_of, text_of_node
from torsh_trainer.translate.shell.quoting import list_tokens
from torsh_trainer.translate.shell.state import ShellState
from torsh_trainer.translate.shell.words import (
    GPUS,
    Hole,
    Text,
    Word,
    merge_parts,
    plain,
    split_words,
    text_if_known,
    word_of,
)

Pieces = list[tuple[Text, bool]]
"""Texts of one word, and whether each stands in quotation marks."""

_SLASHED = re.compile(r"\\(\n|.)", re.DOTALL)
_SLASHED_IN_QUOTES = re.compile(r"\\([$`\"\\\n])")
_EXPANSION = re.compile(
    r"\$\{(?P<sign>[#!]?)(?P<name>\w+|[@*#?$!-])(?:\[(?P<index>(?:[^\[\]]|\[[^\]]*\])*)\])?(?P<rest>.*)\}",
    re.DOTALL,
)
_DEFAULT = re.compile(r"(?P<colon>:?)(?P<sign>[-=+?])(?P<word>.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|(\w+))|\b([A-Za-z_]\w*)(\[[^\]]*\])?")
_BRACES = re.compile(r"\{(?:(-?\d+)\.\.(-?\d+)|([^{}]*,[^{}]*))\}")
_COUNTS_GPUS = re.compile(
    r"nvidia-smi.*(wc\s+-l|grep\s+-c)|device_count\(\)|nvidia-smi.*count", re.DOTALL
)
_COUNTS_ITEMS = re.compile(
    r"""\$\(\s*echo\s+["']?\$\{?(\w+)\}?["']?\s*\|\s*
    (?:tr\s+["']?,["']?\s+["']?\\n["']?\s*\|\s*(?:wc\s+-[lw]|grep\s+-c\s+\S+)
    |awk\s+-F\s*["']?,["']?\s+["']\{\s*print\s+NF\s*;?\s*\}["'])\s*\)""",
    re.VERBOSE,
)
_MOST_ITEMS = 256
_DEEPEST = 12


class Expander:
    """Expands words of one file in a state; ``script`` is what ``$0`` stands for."""

    def __init__(self, lines: list[bytes], script: str) -> None:
        self.lines, self.script = lines, script
        self.depth = 0

    def place(self, node: Any) -> Place:
        """Where ``node`` stands in the file."""
        return place_of(node, self.lines)

    def words(self, node: Any, state: ShellState) -> list[Word]:
        """The words that ``node`` becomes, split where a shell splits them."""
        place = self.place(node)
        whole = self.whole_array(node, state)
        if whole is not None:
            return [word_of(text, place) for text in whole]
        fields = split_words(self.pieces(node, state))
        return [word_of(text, place) for field_ in fields for text in _spread_braces(field_, node)]

    def words_of_nodes(self, nodes: Sequence[Any], state: ShellState) -> list[Word]:
        """The words of neighbours; those that nothing but a line's end parts are one word."""
        found: list[Word] = []
        before: Any = None
        for node in nodes:
            made = self.words(node, state)
            if found and made and before is not None and self.goes_on(before, node):
                parts = merge_parts((*found.pop().parts, *made.pop(0).parts))
                made = [word_of(parts, self.place(before)), *made]
            found += made
            before = node
        return found

    def goes_on(self, before: Any, node: Any) -> bool:
        """Whether ``\\`` ends the line right behind ``before``, and ``node`` begins the next."""
        row, column = before.end_point
        begins = node.start_point == (row + 1, 0)
        return begins and self.lines[row][column:] == b"\\"

    def text(self, node: Any, state: ShellState) -> Text:
        """The text of ``node`` as one word: a value that is assigned, a test's operand."""
        return merge_parts(part for text, _ in self.pieces(node, state) for part in text)

    def whole_array(self, node: Any, state: ShellState) -> list[Text] | None:
        """The items of ``"${A[@]}"`` or ``"$@"``, each a word of its own."""
        text = text_of_node(node).strip('"')
        if text in ("$@", "${@}", "$*") and state.positional is not None:
            return list(state.positional)
        match = _EXPANSION.fullmatch(text)
        if match is None or match["sign"] or match["index"] not in ("@", "*"):
            return None
        items = state.arrays.get(match["name"])
        if match["rest"]:  # a default, which counts where there are no items
            items = items if re.match(r":?[-=?]", match["rest"]) else None
            return list(items.values()) if items else None
        return None if items is None else list(items.values())

    def pieces(self, node: Any, state: ShellState, *, in_quotes: bool = False) -> Pieces:
        """``node`` as texts, each with whether quotation marks protect it; ``in_quotes``: it stands
        within some."""
        kind = node.type
        if kind == "string":
            return [(self.inside(node, state, start=1, end=1), True)]
        if kind == "raw_string":
            return [((text_of_node(node)[1:-1],), True)]
        if kind == "ansi_c_string":
            return [((_unescape(text_of_node(node)[2:-1]),), True)]
        if kind in ("concatenation", "command_name", "translated_string"):
            return [piece for child in node.children for piece in self.pieces(child, state)]
        if kind in ("simple_expansion", "expansion"):
            # The grammar counts blanks before an expansion in a string as part of it.
            before, sign, name = text_of_node(node).partition("$")
            blanks = _SLASHED_IN_QUOTES.sub(lambda m: "" if m[1] == "\n" else m[1], before)
            value = (
                [(self.variable(name, state), False)]
                if kind[0] == "s"
                else self.expand(sign + name, state, in_quotes=in_quotes)
            )
            return [((blanks,), False), *value] if blanks else value
        if kind == "command_substitution":
            return [(self.substitution(node, state), False)]
        if kind == "arithmetic_expansion":
            text = text_of_node(node)
            inner = text[3:-2] if text.startswith("$((") else text[2:-1]
            return [(self.arithmetic(inner, state, text), False)]
        if kind == "process_substitution":
            text = text_of_node(node)
            return [((Hole(text, text),), True)]
        raw = text_of_node(node)
        return [((_SLASHED.sub(lambda m: "" if m[1] == "\n" else m[1], raw),), "\\" in raw)]

    def inside(self, node: Any, state: ShellState, *, start: int = 0, end: int = 0) -> Text:
        """What stands within quotation marks or a here-document, expansions done."""
        source, first = bytes(node.text or b""), node.start_byte
        parts: list[str | Hole] = []
        at, last = start, len(source) - end

        def literal(until: int) -> None:
            raw = source[at:until].decode("utf-8", "replace")
            parts.append(_SLASHED_IN_QUOTES.sub(lambda m: "" if m[1] == "\n" else m[1], raw))

        for child in node.children:
            if not child.is_named or child.type in ("string_content", "heredoc_content", "ERROR"):
                continue
            literal(child.start_byte - first)
            for text, _ in self.pieces(child, state, in_quotes=True):
                parts.extend(text)
            at = child.end_byte - first
        literal(last)
        return merge_parts(parts)

    def variable(self, name: str, state: ShellState) -> Text:
        """The value of ``$name``."""
        if name in ("0", "BASH_SOURCE"):
            return (self.script,)
        if name in ("@", "*"):
            if state.positional is None:
                return (Hole("@", f"${name}"),)
            return merge_parts(part for item in state.positional for part in (*item, " "))
        if name == "#" and state.positional is not None:
            return (str(len(state.positional)),)
        name = state.name_argument(name)
        found = state.lookup(name)
        if found is None and name in state.cleared:
            return ()
        return found if found is not None else (Hole(name, f"${name}"),)

    def expand(self, text: str, state: ShellState, *, in_quotes: bool) -> Pieces:
        """``${...}`` as texts; what stands there behind ``:-`` may have quotation marks."""
        match = _EXPANSION.fullmatch(text)
        if match is None:
            return [((Hole(text, text),), False)]
        default = None if match["sign"] else _DEFAULT.fullmatch(match["rest"])
        if default is None:
            return [(self.expansion(match, state), False)]
        name, index = state.name_argument(match["name"]), match["index"]
        value = self.value_at(name, index, state) if index is not None else self.value(name, state)
        missing = value is None or (bool(default["colon"]) and value == ()) or state.lacks(name)
        sign = default["sign"]
        if sign == "+" and missing:
            return [((), False)]
        if sign != "+" and not missing:
            assert value is not None
            return [(value, False)]
        if sign == "?":
            return [((Hole(name, f"${name}"),), False)]
        pieces = self.default_of(default["word"], state, in_quotes=in_quotes)
        if sign == "=":
            value = merge_parts(part for piece, _ in pieces for part in piece)
            state.assign(name, value)
            return [(value, False)]
        return pieces

    def default_of(self, raw: str, state: ShellState, *, in_quotes: bool) -> Pieces:
        """What stands behind ``:-`` as texts, each with whether quotation marks protect it."""
        try:
            tokens = list(list_tokens(raw, in_quotes=in_quotes))
        except ValueError:
            return [((Hole(raw, raw),), False)]
        if self.depth >= _DEEPEST:
            return [((Hole(raw, raw),), False)]
        found: Pieces = []
        self.depth += 1
        for token in tokens:
            if not token.is_expansion:
                found.append(((token.text,) if token.text else (), token.quoted))
                continue
            assigned = parse(f"v={token.text}").children[:1]
            if not assigned or assigned[0].has_error or len(assigned[0].children) != 3:
                found.append(((Hole(token.text, token.text),), token.quoted))
                continue
            inner = self.pieces(assigned[0].children[2], state, in_quotes=token.quoted)
            found += [(text, quoted or token.quoted) for text, quoted in inner]
        self.depth -= 1
        return found

    def expansion(self, match: re.Match[str], state: ShellState) -> Text:
        """The value of ``${...}`` without a default."""
        text, hole = match[0], (Hole(match[0], match[0]),)
        name, index, rest = state.name_argument(match["name"]), match["index"], match["rest"]
        if match["sign"] == "!":
            target = text_if_known(self.variable(name, state))
            return self.variable(target, state) if target and re.fullmatch(r"\w+", target) else hole
        if match["sign"] == "#":
            return self.length(name, index, state, hole)
        value = self.value_at(name, index, state) if index is not None else self.value(name, state)
        if not rest:
            return value if value is not None else (self.hole_of_index(name, index, text, state),)
        known = None if value is None else text_if_known(value)
        if known is None:
            return (Hole(name, text),)
        if name in ("@", "*") and re.fullmatch(r":\d+", rest):  # words, not letters
            return (" ".join(known.split()[max(0, int(rest[1:]) - 1) :]),)
        changed = _change(known, rest, lambda raw: text_if_known(self.template(raw, state)))
        return hole if changed is None else (changed,)

    def hole_of_index(self, name: str, index: str | None, text: str, state: ShellState) -> Hole:
        """What is not known of ``${name[index]}``: the index, where the array is known."""
        if index is not None and name in state.arrays:
            for part in self.arithmetic(index, state, index):
                if isinstance(part, Hole):
                    return Hole(part.name, text)
        return Hole(name, text)

    def value(self, name: str, state: ShellState) -> Text | None:
        if name in ("0", "@", "*", "#", "BASH_SOURCE"):
            return self.variable(name, state)
        return state.lookup(name)

    def value_at(self, name: str, index: str, state: ShellState) -> Text | None:
        items = state.arrays.get(name)
        if name in state.known:
            return (state.known[name],)
        if name == "BASH_SOURCE" and index in ("0", "-1"):
            return (self.script,)
        if items is None:
            return state.lookup(name) if index in ("@", "*", "0") else None
        if index in ("@", "*"):
            return merge_parts([part for item in items.values() for part in (*item, " ")][:-1])
        key = text_if_known(self.template(index, state))
        if key is None:
            return None
        if key not in items and (number := self.number(key, state)) is not None:
            key = str(number if number >= 0 else len(items) + number)
        return items.get(key, ())

    def number(self, text: str, state: ShellState) -> int | None:
        known = text_if_known(self.arithmetic(text, state, text))
        return int(known) if known is not None else None

    def length(self, name: str, index: str | None, state: ShellState, hole: Text) -> Text:
        if index in ("@", "*"):
            items = state.arrays.get(name)
            holes = items is None or any(text_if_known(item) is None for item in items.values())
            return hole if items is None or holes else (str(len(items)),)
        value = state.lookup(name)
        known = None if value is None else text_if_known(value)
        return hole if known is None else (str(len(known)),)

    def template(self, raw: str, state: ShellState) -> Text:
        """Text that stands within ``${...}``, with expansions of its own."""
        if not re.search(r"[$`\"'\\]", raw):
            return (raw,) if raw else ()
        if self.depth >= _DEEPEST:
            return (Hole(raw, raw),)
        self.depth += 1
        try:
            root = parse(f"v={raw}" if raw[:1] in "\"'" else f'v="{raw}"')
            assigned = root.children[0] if root.children else None
            if root.has_error or assigned is None or len(assigned.children) != 3:
                return (Hole(raw, raw),)
            return self.text(assigned.children[2], state)
        finally:
            self.depth -= 1

    def arithmetic(self, raw: str, state: ShellState, written: str) -> Text:
        """The value of ``$((raw))``."""
        holes: list[Hole] = []

        def number(match: re.Match[str]) -> str:
            name = match[1] or match[2] or match[3]
            if match[4]:
                value = self.value_at(name, match[4][1:-1], state)
            else:
                value = state.lookup(name)
            known = None if value is None else text_if_known(value)
            if known is not None and re.fullmatch(r"\s*-?\d+\s*", known):
                return known.strip()
            if known == "":
                return "0"
            first = next((part for part in value or () if isinstance(part, Hole)), None)
            holes.append(first or Hole(name, f"${name}"))
            return "?"

        expanded = raw
        if "$(" in raw or "${" in raw or "`" in raw:
            text = self.template(re.sub(r"\$\{(\w+)\}", r"$\1", raw), state)
            found = [part for part in text if isinstance(part, Hole)]
            if found:
                return (Hole(found[0].name, written, means=found[0].means),)
            expanded = plain(text)
        expanded = _REFERENCE.sub(number, expanded)
        if holes:
            return (Hole(holes[0].name, written),)
        value = compute(expanded)
        return (Hole(written, written),) if value is None else (str(value),)

    def substitution(self, node: Any, state: ShellState) -> Text:
        """The output of ``$(...)`` where it follows from words alone; nothing is executed."""
        text = text_of_node(node)
        if _COUNTS_GPUS.search(text):
            return (Hole(text, text, means=GPUS),)
        if match := _COUNTS_ITEMS.fullmatch(text):
            return self.count_items(match[1], state, text)
        inner = [child for child in node.children if child.is_named]
        while len(inner) == 1 and inner[0].type == "list" and not _has_or(inner[0]):
            inner = [child for child in inner[0].children if child.is_named]
        if inner and text_of_node(inner[-1]) == "pwd":
            return self.folder_of(inner, state, text)
        if len(inner) == 1 and inner[0].type == "redirected_statement":
            inner = [child for child in inner[0].children if child.is_named][:1]
        if len(inner) != 1 or inner[0].type != "command" or self.depth >= _DEEPEST:
            return (Hole(_name_of(text), text),)
        self.depth += 1
        words = [w for child in inner[0].children for w in self.words(child, state)]
        self.depth -= 1
        if not words or any(word.open for word in words):
            return (Hole(_name_of(text), text),)
        pure = _PURE.get(words[0].text)
        said = pure([word.text for word in words[1:]]) if pure else None
        return (Hole(_name_of(text), text),) if said is None else (said,)

    def folder_of(self, inner: list[Any], state: ShellState, text: str) -> Text:
        """``$(pwd)``, and ``$(cd FOLDER && pwd)``."""
        if len(inner) == 1:
            return (state.folder or ".",)
        words = self.words_of_command(inner[0], state)
        if len(words) >= 2 and words[0].text == "cd" and not words[-1].open:
            return (words[-1].text,)
        return (Hole(_name_of(text), text),)

    def words_of_command(self, node: Any, state: ShellState) -> list[Word]:
        """All words of a command, or of the command within a redirection."""
        while node.type in ("redirected_statement", "list") and node.children:
            node = node.children[0]
        children = [child for child in node.children if child.type != "file_redirect"]
        return self.words_of_nodes(children, state)

    def count_items(self, name: str, state: ShellState, text: str) -> Text:
        """How many items, between commas, a variable has."""
        value = state.lookup(name)
        known = None if value is None else text_if_known(value)
        return (Hole(name, text),) if known is None else (str(len(known.split(","))),)


def _name_of(text: str) -> str:
    return " ".join(text.split())


def _has_or(node: Any) -> bool:
    return any(child.type == "||" for child in node.children)


def _unescape(text: str) -> str:
    known = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
    return _SLASHED.sub(lambda m: known.get(m[1], m[1]), text)


def _spread_braces(text: Text, node: Any) -> list[Text]:
    """``{1..3}`` and ``{a,b}`` as several words."""
    if node.type not in ("brace_expression", "concatenation", "word"):
        return [text]
    if '"' in text_of_node(node) or "'" in text_of_node(node):
        return [text]
    known = text_if_known(text)
    match = _BRACES.search(known) if known is not None else None
    if match is None or known is None:
        return [text]
    if match[3] is not None:
        items = match[3].split(",")
    else:
        first, last = int(match[1]), int(match[2])
        step = 1 if last >= first else -1
        items = [str(n) for n in range(first, last + step, step)[:_MOST_ITEMS]]
    return [(known[: match.start()] + item + known[match.end() :],) for item in items]


def _change(text: str, rest: str, expand: Callable[[str], str | None]) -> str | None:
    """``${x%pattern}``, ``${x/a/b}``, ``${x:1:2}``, ``${x,,}`` of a text that is known."""
    if rest in (",,", "^^"):
        return text.lower() if rest == ",," else text.upper()
    if match := re.fullmatch(r":\s*(-?\d+)(?::(-?\d+))?", rest):
        start = int(match[1])
        return text[start:] if match[2] is None else text[start:][: int(match[2])]
    if match := re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL):
        pattern = expand(match[2])
        return None if pattern is None else _strip(text, match[1], pattern)
    if match := re.fullmatch(r"(//?)([^/]+)(?:/(.*))?", rest, re.DOTALL):
        old, new = expand(match[2]), expand(match[3] or "")
        if old is None or new is None or re.search(r"[*?\[]", old):
            return None
        return text.replace(old, new, -1 if match[1] == "//" else 1)
    return None


def _strip(text: str, sign: str, pattern: str) -> str:
    """Without the part at its beginning (``#``) or end (``%``) that ``pattern`` takes."""
    if len(pattern) > 100 or len(text) > 1000 or pattern.count("*") > 2:
        return text
    regex = "".join(
        {"*": ".*", "?": "."}.get(character, re.escape(character)) for character in pattern
    )
    whole = re.compile(regex, re.DOTALL)
    cuts = range(len(text) + 1)
    if sign in ("%", "##"):
        cuts = range(len(text), -1, -1)
    for at in cuts:
        part = text[:at] if sign[0] == "#" else text[at:]
        if whole.fullmatch(part):
            return text[at:] if sign[0] == "#" else text[:at]
    return text


def _base_name(words: list[str]) -> str | None:
    if not words:
        return None
    name = PurePosixPath(words[0]).name
    return name.removesuffix(words[1]) if len(words) > 1 else name


def _number_text(text: str) -> str | None:
    value = compute(text)
    return None if value is None else str(value)


def _count_up(words: list[str]) -> str | None:
    if not words or len(words) > 3 or not all(re.fullmatch(r"-?\d+", word) for word in words):
        return None
    numbers = [int(word) for word in words]
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    if not step:
        return None
    last = numbers[-1] + (1 if step > 0 else -1)
    return " ".join(str(n) for n in range(first, last, step)[:_MOST_ITEMS])


_PURE: Mapping[str, Callable[[list[str]], str | None]] = {
    "echo": lambda words: " ".join(word for word in words if word not in ("-n", "-e")),
    "basename": _base_name,
    "dirname": lambda words: str(PurePosixPath(words[0]).parent) if words else None,
    "realpath": lambda words: words[-1] if words else None,
    "readlink": lambda words: words[-1] if words else None,
    "which": lambda words: words[-1] if words else None,
    "expr": lambda words: _number_text(" ".join(words).replace("\\*", "*")),
    "seq": _count_up,
}
"""Commands whose output follows from their words alone."""
