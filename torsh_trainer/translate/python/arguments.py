"""argparse as scripts use it: what is declared, and what the words of a command line make of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.python.events import place_of
from torsh_trainer.translate.python.expressions import Expressions
from torsh_trainer.translate.python.values import FUNCTIONS, ImportedName, Thing, Unknown, compute


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
        _declare(owner.facts["defaults"], args, named, walk)
        return walk.unknown(node)
    if name in ("add_argument_group", "add_mutually_exclusive_group"):
        return owner
    if name == "set_defaults":
        owner.facts["defaults"] |= named
    if name in ("parse_args", "parse_known_args"):
        found = dict(owner.facts["defaults"])
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


def _declare(
    defaults: dict[str, Any], args: list[Any], named: Mapping[str, Any], walk: Expressions
) -> None:
    """Enters an argument of argparse with what it is where nobody says otherwise."""
    flags = [arg for arg in args if isinstance(arg, str)]
    long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
    name = named.get("dest", long.lstrip("-").replace("-", "_"))
    if not isinstance(name, str):
        return
    action = named.get("action")
    switched = {"store_true": False, "store_false": True}.get(str(action))
    default = named.get("default", switched)
    kind = named.get("type")
    if (
        isinstance(default, str)
        and isinstance(kind, ImportedName)
        and kind.dotted in ("int", "float")
    ):
        default = compute(FUNCTIONS[kind.dotted], default, otherwise=Unknown(name, Place()))
    given = next((flag for flag in flags if flag in walk.arguments), None)
    if given is not None:
        walk.used.add(given)
        default = _read_word(walk.arguments[given], kind, switched, named.get("const"))
    required = default is None and "default" not in named
    if required and (named.get("required") or not long.startswith("-")):
        default = Unknown(f"args.{name}", Place())
    defaults[name] = default


def _read_word(raw: Any, kind: Any, switched: bool | None, const: Any) -> Any:
    """What a word of the command line is for the script."""
    if switched is not None:
        return not switched
    if raw is True and const is not None:
        return const
    types: Mapping[str, Callable[..., Any]] = {"int": int, "float": float, "str": str}
    if isinstance(kind, ImportedName) and kind.dotted in types:
        return compute(types[kind.dotted], raw, otherwise=Unknown(str(raw), Place()))
    return raw


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """The words of a command line: option -> the word after it, true where none follows."""
    found: dict[str, Any] = {}
    for i, word in enumerate(words):
        flag, equals, inline = word.partition("=")
        if not flag.startswith("-") or _is_number(flag):
            continue
        following = words[i + 1] if i + 1 < len(words) else "-"
        alone = following.startswith("-") and not _is_number(following)
        found[flag] = inline if equals else True if alone else following
    return found


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
