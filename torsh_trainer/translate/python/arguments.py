"""argparse as scripts use it: what is declared, and what the words of a command line make of it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.python.events import place_of
from torsh_trainer.translate.python.expressions import Expressions
from torsh_trainer.translate.python.values import (
    Function,
    ImportedName,
    ScriptDict,
    Thing,
    Unknown,
    function_of_lambda,
    is_plain,
)


def call_parser(
    walk: Expressions,
    owner: Thing,
    name: str,
    args: list[Any],
    named: dict[str, Any],
    node: ast.Call,
) -> Any:
    """The value of a method of a parser."""
    if name == "add_argument":
        declare(walk, owner.facts, args, named, node)
        return walk.unknown(node)
    if name in ("add_argument_group", "add_mutually_exclusive_group"):
        return owner
    if name == "set_defaults":
        owner.facts["defaults"] |= named
    if name in ("parse_args", "parse_known_args"):
        found = dict(owner.facts["defaults"])
        _take_short_forms(owner.facts.get("declared", {}), found, walk)
        for key in found:
            if key in walk.arguments:
                walk.used.add(key)
                found[key] = walk.arguments[key]
        space = Thing("arguments", place_of(node), found)
        return space if name == "parse_args" else (space, [])
    return walk.unknown(node)


def define_flag(walk: Expressions, args: list[Any], named: Mapping[str, Any]) -> None:
    """Enters a flag of absl with what the command line says of it, or its default."""
    name = args[0] if args else named.get("name")
    if not isinstance(name, str):
        return
    value = args[1] if len(args) > 1 else named.get("default")
    for flag, stated in ((f"--{name}", None), (f"--no{name}", False)):
        if flag in walk.arguments:
            walk.used.add(flag)
            value = read_setting(str(walk.arguments[flag])) if stated is None else stated
    walk.flags[name] = Unknown(f"FLAGS.{name}", Place()) if value is None else value


def read_parameters(walk: Expressions, function: Function) -> dict[str, Any]:
    """Parameters of a function by the words of the line, as ``fire.Fire`` reads them: literals."""
    definition = function.node.args
    found: dict[str, Any] = {}
    for part in (*definition.posonlyargs, *definition.args, *definition.kwonlyargs):
        for flag in (f"--{part.arg}", f"--{part.arg.replace('_', '-')}"):
            if flag in walk.arguments:
                walk.used.add(flag)
                said = walk.arguments[flag]
                found[part.arg] = read_setting(str(said)) if isinstance(said, str) else said
    return found


class GivenWord(str):
    """The word behind an option; ``more`` are those that follow it, up to the next option."""

    more: tuple[str, ...] = ()


class _Declared(NamedTuple):
    """An option of argparse: the name of its value, and how words are read for it."""

    name: str
    read: Callable[[Any], Any]


def _take_short_forms(
    declared: Mapping[str, _Declared], found: dict[str, Any], walk: Expressions
) -> None:
    """What the line gives as argparse allows it: ``--batch`` for ``--batch-size``, ``-b32``."""
    for word, value in walk.arguments.items():
        if word in declared or not word.startswith("-"):
            continue
        if word.startswith("--"):
            meant = [flag for flag in declared if flag.startswith(word)]
            names = {declared[flag].name for flag in meant}
            if len(names) == 1:
                walk.used.add(word)
                found[names.pop()] = declared[meant[0]].read(value)
        elif word[:2] in declared and len(word) > 2:
            walk.used.add(word)
            found[declared[word[:2]].name] = declared[word[:2]].read(word[2:])


def declare(
    walk: Expressions,
    facts: dict[str, Any],
    args: list[Any],
    named: Mapping[str, Any],
    node: ast.Call,
) -> None:
    """Enters an argument of argparse with what it is where nobody says otherwise."""
    defaults = facts["defaults"]
    flags = [arg for arg in args if isinstance(arg, str)]
    long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
    name = named.get("dest", long.lstrip("-").replace("-", "_"))
    if not isinstance(name, str):
        return
    action = named.get("action")
    switched = {"store_true": False, "store_false": True}.get(str(action))
    default = named.get("default", switched)
    read_word = _find_reader(walk, named.get("type"), name, node)
    if isinstance(default, str):
        default = read_word(default)
    missing = Unknown(f"args.{name}", place_of(node))

    def read(raw: Any) -> Any:
        if switched is not None:
            return not switched
        count = named.get("nargs")
        if raw is True:
            return named.get("const", missing)
        if action in ("append", "extend", "count"):
            return missing  # of several such words only the last is known here
        several = count not in (None, "?")
        words = [raw, *getattr(raw, "more", ())] if several else [raw]
        words = words[:count] if isinstance(count, int) else words
        values = [read_word(word) if isinstance(word, str) else word for word in words]
        return values if several else values[0]

    optional = action in ("BooleanOptionalAction", "argparse.BooleanOptionalAction") or (
        isinstance(action, ImportedName) and action.dotted.endswith("BooleanOptionalAction")
    )
    declared = facts.setdefault("declared", {})
    said_before = any(one.name == name for one in declared.values())
    for flag in flags:
        declared[flag] = _Declared(name, read)
        if optional and (off := f"--no-{flag.lstrip('-')}") in walk.arguments:
            walk.used.add(off)
            default = False
    given = next((flag for flag in reversed(list(walk.arguments)) if flag in flags), None)
    places = facts.setdefault("places", {})
    if given is not None:
        walk.used.update(flag for flag in flags if flag in walk.arguments)
        place = list(walk.arguments).index(given)
        if place < places.setdefault(name, place):
            return
        places[name] = place
        default = True if optional else read(walk.arguments[given])
    elif said_before:  # --x and --no-x: the default is the first one's
        return
    required = default is None and "default" not in named
    if required and (named.get("required") or not long.startswith("-")):
        default = missing
    defaults[name] = default


def _find_reader(walk: Expressions, kind: Any, name: str, node: ast.Call) -> Callable[[str], Any]:
    """What ``type=`` makes of a word: a number, a text, what a function of the script returns."""
    if kind is None:
        return str
    if isinstance(kind, Unknown) and isinstance(kind.of, ast.Lambda):
        kind = function_of_lambda(kind.of, walk.module)
    missing = Unknown(f"args.{name}", place_of(node))

    def read(word: str) -> Any:
        if isinstance(kind, ImportedName) and kind.dotted.endswith(_TRUTHS):
            return read_truth(word, otherwise=missing)
        made = kind(word) if callable(kind) else walk.call_value(kind, [str(word)], {}, node)
        return made if is_plain(made) or isinstance(made, ScriptDict) else missing

    return read


_TRUTHS = ("strtobool", "string_to_bool", "str2bool", "str_to_bool")
"""Functions of libraries that read yes and no."""


def read_truth(word: str, *, otherwise: Any) -> Any:
    """Yes or no as such functions read it."""
    said = word.lower()
    if said in ("yes", "true", "t", "y", "1", "on"):
        return True
    return False if said in ("no", "false", "f", "n", "0", "off") else otherwise


class GivenWords(dict[str, Any]):
    """Option -> the word after it; ``words`` are all of them, in their order, ``environment`` the
    variables that stand around them: an ``Unknown`` where only a shell could tell."""

    words: tuple[str, ...] = ()
    environment: Mapping[str, Any] = MappingProxyType({})


def read_words(words: Sequence[str]) -> GivenWords:
    """The words of a command line: option -> the word after it, true where none follows; of an
    option that is given twice the last counts, and stands last."""
    found = GivenWords()
    found.words = tuple(words)
    for i, word in enumerate(words):
        flag, equals, inline = word.partition("=")
        if not flag.startswith("-") or _is_number(flag):
            continue
        found.pop(flag, None)
        behind = list(itertools.takewhile(_is_value, words[i + 1 :]))
        if equals:
            found[flag] = inline
        elif behind:
            found[flag] = GivenWord(behind[0])
            found[flag].more = tuple(behind[1:])
        else:
            found[flag] = True
    return found


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _is_number(word)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+(e-?\d+)?", text) is not None


def is_expression(text: str) -> bool:
    """Whether ``--set`` names an expression of a script, which is more than one name."""
    try:
        body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    return not isinstance(body, ast.Name | ast.Constant)


def read_setting(text: str) -> Any:
    """What ``--set`` states: a Python literal, true, false, null, or the text itself."""
    if text in ("true", "false", "null", "None"):
        return {"true": True, "false": False}.get(text)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return list(value) if isinstance(value, tuple) else value
