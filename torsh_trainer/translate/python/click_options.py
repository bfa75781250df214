"""click as scripts use it: options in decorators, and what words make of a command's parameters."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from torsh_trainer.translate.python.arguments import read_truth
from torsh_trainer.translate.python.events import place_of
from torsh_trainer.translate.python.expressions import Expressions
from torsh_trainer.translate.python.values import (
    Function,
    ImportedName,
    ScriptDict,
    Thing,
    Unknown,
    is_plain,
)

_OPTIONS = ("click.option", "rich_click.option", "typer.option")
_ARGUMENTS = ("click.argument", "rich_click.argument")
_TYPES: Mapping[str, str] = {
    "int": "int",
    "click.INT": "int",
    "click.IntRange": "int",
    "float": "float",
    "click.FLOAT": "float",
    "click.FloatRange": "float",
    "str": "str",
    "click.STRING": "str",
    "click.Path": "str",
    "pathlib.Path": "str",
    "click.Choice": "str",
    "bool": "bool",
    "click.BOOL": "bool",
}
"""What ``type=`` may be -> what words are read as."""


def read_options(walk: Expressions, function: Function) -> dict[str, Any]:
    """The parameters of a command of click with what the words of the line, or its defaults, give
    them; those that reading does not tell are left out."""
    found: dict[str, Any] = {}
    for node in function.node.decorator_list:
        if not isinstance(node, ast.Call):
            continue
        called = walk.value(node.func, function.module.scope)
        if not isinstance(called, ImportedName) or called.dotted not in (*_OPTIONS, *_ARGUMENTS):
            continue
        args = [walk.value(arg, function.module.scope) for arg in node.args]
        named = {
            word.arg: walk.value(word.value, function.module.scope)
            for word in node.keywords
            if word.arg is not None
        }
        names = [arg for arg in args if isinstance(arg, str)]
        if called.dotted in _ARGUMENTS:
            value: Any = named.get("default")
            name = names[0].lower().replace("-", "_") if names else ""
            value = Unknown(name, place_of(node)) if value is None else value
        else:
            name = _name_of(names)
            value = _ClickOption(walk, names, named, node).read()
        if name.isidentifier() and not isinstance(value, Unknown):
            found[name] = value
    return found


def _name_of(declared: Sequence[str]) -> str:
    """The parameter of an option: the name without dashes, else the first of the longest dashes."""
    plain = [text for text in declared if text.isidentifier()]
    if plain:
        return plain[-1]
    firsts = [text.partition("/")[0].strip() for text in declared]
    firsts.sort(key=lambda text: -(len(text) - len(text.lstrip("-"))))
    return firsts[0].lstrip("-").replace("-", "_").lower() if firsts else ""


class _ClickOption:
    """One option: its flags, those that switch it off, and the type of its words."""

    def __init__(
        self, walk: Expressions, declared: Sequence[str], named: Mapping[str, Any], node: ast.Call
    ) -> None:
        self.walk, self.named, self.node = walk, named, node
        self.on: list[str] = []
        self.off: list[str] = []
        for text in declared:
            if text.isidentifier():
                continue
            on, slash, off = text.partition("/")
            self.on.append(on.strip())
            self.off += [off.strip()] if slash else []
        self.missing = Unknown(_name_of(declared), place_of(node))
        self.is_flag = named.get("is_flag", bool(self.off) or "flag_value" in named)
        self.is_known = named.get("callback") is None and not named.get("count")

    def read(self) -> Any:
        """Its value; ``Unknown`` where reading does not tell it."""
        given = [flag for flag in self.walk.arguments if flag in (*self.on, *self.off)]
        self.walk.used.update(given)
        if not self.is_known or self.named.get("envvar"):
            return self.missing
        if not given:
            return self.default()
        word = self.walk.arguments[given[-1]]
        if self.is_flag:
            if given[-1] in self.off:
                return False
            return self.named.get("flag_value", True)
        count = self.named.get("nargs", 1)
        if self.named.get("multiple"):
            return self.missing  # of several such words only the last is known here
        words = [word, *getattr(word, "more", ())][:count] if count != 1 else [word]
        values = [self.convert(one) for one in words]
        if any(isinstance(value, Unknown) for value in values):
            return self.missing
        return values[0] if count == 1 else tuple(values)

    def default(self) -> Any:
        """What it is where the line says nothing."""
        default = self.named.get("default")
        if default is None:
            if self.is_flag:
                return self.missing if "flag_value" in self.named else False
            if self.named.get("required") or self.named.get("prompt"):
                return self.missing
            return () if self.named.get("multiple") else None
        if isinstance(default, str):
            return self.convert(default)
        return default if is_plain(default) or isinstance(default, ScriptDict) else self.missing

    def convert(self, word: Any) -> Any:
        """A word as its type reads it: that of ``type=``, or of the default."""
        if not isinstance(word, str):
            return self.missing
        kind = self.kind()
        if kind == "bool":
            return read_truth(word, otherwise=self.missing)
        if kind in ("int", "float"):
            made = self.walk.call_value(ImportedName(kind), [str(word)], {}, self.node)
            return made if is_plain(made) else self.missing
        return str(word) if kind == "str" else self.missing

    def kind(self) -> str:
        stated = self.named.get("type")
        if stated is None:
            default = self.named.get("default")
            default = default[0] if isinstance(default, list | tuple) and default else default
            return type(default).__name__ if isinstance(default, bool | int | float) else "str"
        if isinstance(stated, Unknown) and isinstance(stated.of, ast.Call):
            stated = self.walk.value(stated.of.func, self.walk.module.scope)
        if isinstance(stated, Thing):
            return ""
        return _TYPES.get(stated.dotted, "") if isinstance(stated, ImportedName) else ""
