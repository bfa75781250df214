"""Dataclasses of a script, and ``HfArgumentParser``, which fills them from a command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.python.arguments import (
    call_parser,
    declare,
    read_truth,
    read_words,
)
from torsh_trainer.translate.python.events import place_of
from torsh_trainer.translate.python.expressions import Expressions
from torsh_trainer.translate.python.project import read_record
from torsh_trainer.translate.python.training_arguments import TRAINING_ARGUMENTS, UNSTEADY
from torsh_trainer.translate.python.values import (
    ImportedName,
    Kind,
    ScriptDict,
    Thing,
    Unknown,
    function_of_lambda,
)
from torsh_trainer.translate.reading import text_of

PARSER = "HfArgumentParser"
_OF_WORDS = "parse_args_into_dataclasses"
_OF_FILES = {"parse_json_file": "json_file", "parse_yaml_file": "yaml_file"}
METHODS = (_OF_WORDS, "parse_dict", *_OF_FILES)
"""Methods of such a parser that return dataclasses."""

_NOWHERE = Place()
_LISTS = ("list", "List", "Sequence", "Iterable")
_TRAINING = "TrainingArguments"
_OF_OTHERS = re.compile(r"(?!transformers\.)[\w.]+(?<!Model)(?<!Script)(Config|TrainingArguments)")

DECLARED = "arguments.declared"
"""The event that a script declares its arguments by dataclasses."""


@dataclass(frozen=True)
class DataclassField:
    """A field: how its words are read (``int``, ``bool``, ...; empty: not known), whether several
    follow, whether it may be None, and its default; ``UNSTEADY`` where it has none that reading
    tells."""

    name: str
    kind: str
    default: Any = UNSTEADY
    is_list: bool = False
    is_optional: bool = False
    aliases: tuple[str, ...] = ()
    is_required: bool = False
    place: Place = _NOWHERE
    file: str = ""
    is_own: bool = False
    """A class of the script states it, at ``place`` of ``file``."""


def is_dataclass(walk: Expressions, kind: Kind) -> bool:
    """Whether a class of the script is decorated as one."""
    names = [walk.value(_strip_call(node), kind.module.scope) for node in kind.node.decorator_list]
    return any(
        isinstance(name, ImportedName) and name.dotted.endswith("dataclass") for name in names
    )


def list_fields(walk: Expressions, kind: Any) -> dict[str, DataclassField]:
    """The fields that a dataclass is made with, those of its bases first; of transformers'
    ``TrainingArguments`` those that scripts read."""
    if isinstance(kind, ImportedName):
        ours = kind.dotted.startswith("transformers.") and kind.dotted.endswith(_TRAINING)
        return {
            name: DataclassField(name, of, default if ours else UNSTEADY)
            for name, (of, default) in TRAINING_ARGUMENTS.items()
        }
    if not isinstance(kind, Kind):
        return {}
    found: dict[str, DataclassField] = {}
    for base in kind.node.bases:
        found |= list_fields(walk, walk.value(base, kind.module.scope))
    module, walk.module = walk.module, kind.module
    for node in kind.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            made = _field_of(walk, node.target.id, node)
            if made is not None:
                own = replace(made, place=place_of(node), file=kind.module.file, is_own=True)
                found[made.name] = own
    walk.module = module
    return found


def fill_dataclass(
    walk: Expressions, made: Thing, args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Gives an object of a dataclass its fields, and runs its ``__post_init__``."""
    kind: Kind = made.facts["__class__"]
    fields = list_fields(walk, kind)
    given = {**dict(zip(fields, args, strict=False)), **named}
    for name, one in fields.items():
        if name in given:
            made.facts[name] = given[name]
        elif one.default is not UNSTEADY:
            made.facts[name] = one.default
    end = walk.find_method(kind, "__post_init__")
    if end is not None:
        call = ast.copy_location(ast.Call(ast.Name(kind.node.name), [], []), end.node)
        walk.call_value(end, [made], {}, call)


def make_parser(walk: Any, args: Sequence[Any], named: Mapping[str, Any], node: ast.Call) -> Thing:
    """The parser of ``HfArgumentParser((ModelArguments, TrainingArguments))``."""
    _take_words_beside(walk)
    types = args[0] if args else named.get("dataclass_types", ())
    kinds = list(types) if isinstance(types, list | tuple) else [types]
    parser = Thing("parser", place_of(node), {"defaults": {}, "dataclasses": kinds})
    fields = [one for kind in kinds for one in list_fields(walk, kind).values()]
    for one in fields:
        _declare_field(walk, parser.facts, one, node)
    others = [name for kind in kinds for name in _list_others(walk, kind)]
    walk.event(DECLARED, node, {"fields": fields, "others": others})
    return parser


def _list_others(walk: Expressions, kind: Any) -> Iterator[str]:
    """Classes of arguments of other libraries, which are made of ``TrainingArguments``."""
    if isinstance(kind, Kind):
        for base in kind.node.bases:
            yield from _list_others(walk, walk.value(base, kind.module.scope))
    elif isinstance(kind, ImportedName) and _OF_OTHERS.fullmatch(kind.dotted):
        yield kind.dotted


def _take_words_beside(walk: Any) -> None:
    """``train.args`` beside ``train.py``, of which such a parser reads words before the line's."""
    file = None if walk.script is None else walk.script.with_suffix(".args")
    if file is not None and file.is_file():
        words = getattr(walk.arguments, "words", ())
        walk.arguments = read_words([*text_of(file).split(), *words]) | walk.arguments


def call_dataclass_parser(
    walk: Any, parser: Thing, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
) -> Any:
    """The dataclasses that a parser returns: of the words, of a dictionary, of a file."""
    if name == _OF_WORDS:
        return _parse_words(walk, parser, named, node)
    if name == "parse_dict":
        return _parse_record(walk, parser, args[0] if args else named.get("args"), node)
    path = args[0] if args else named.get(_OF_FILES[name])
    if not isinstance(path, str) and "sys.argv" in walk.around.under:
        return _parse_words(walk, parser, named, node)  # no file is named: the words count
    found = walk.find_file(path) if isinstance(path, str) and walk.find_file is not None else None
    try:
        record = None if found is None else read_record(found)
    except (ConfigError, ResourceError):
        record = None
    if record is None and isinstance(path, str | Unknown):
        text = path if isinstance(path, str) else path.text
        walk.event("load.missing", node, {"path": text, "is_known": isinstance(path, str)})
    return _parse_record(walk, parser, record, node)


def _parse_words(walk: Any, parser: Thing, named: Mapping[str, Any], node: ast.Call) -> Any:
    if "parsed" not in parser.facts:
        values = call_parser(walk, parser, "parse_args", [], {}, node).facts
        parts = [_make(walk, kind, values, node) for kind in parser.facts["dataclasses"]]
        taken = {name for kind in parser.facts["dataclasses"] for name in list_fields(walk, kind)}
        more = {name: value for name, value in values.items() if name not in taken}
        parts += [Thing("arguments", place_of(node), more)] if more else []
        parser.facts["parsed"] = tuple(parts)
    rest = named.get("return_remaining_strings", False)
    return (*parser.facts["parsed"], walk.unknown(node)) if rest else parser.facts["parsed"]


def _parse_record(walk: Any, parser: Thing, record: Any, node: ast.Call) -> Any:
    """Dataclasses of a dictionary; what it says is what such a parser takes as it is."""
    values = record if isinstance(record, dict) else None
    return tuple(_make(walk, kind, values, node) for kind in parser.facts["dataclasses"])


def _make(walk: Any, kind: Any, values: Mapping[str, Any] | None, node: ast.Call) -> Thing:
    """One dataclass with its values; without them nothing of it is known."""
    fields = list_fields(walk, kind)
    given = {
        name: value
        for name, value in (values or {}).items()
        if name in fields and not (isinstance(value, Unknown) and value.text == f"args.{name}")
    }
    if isinstance(kind, Kind):
        made = Thing("arguments", place_of(node), {"__class__": kind})
        kind.made.append(made)
        if values is not None:
            fill_dataclass(walk, made, [], given)
        return made
    defaults = {n: one.default for n, one in fields.items() if one.default is not UNSTEADY}
    return Thing("arguments", place_of(node), {**defaults, **given} if values is not None else {})


def _declare_field(
    walk: Expressions, facts: dict[str, Any], one: DataclassField, node: ast.Call
) -> None:
    """Declares the options of a field, as ``HfArgumentParser._parse_dataclass_field`` does."""
    flags = [f"--{one.name}"]
    if "_" in one.name:
        flags.append(f"--{one.name.replace('_', '-')}")
    missing = Unknown(f"args.{one.name}", place_of(node))
    default = missing if one.default is UNSTEADY else one.default
    if one.kind == "bool" and one.is_required:
        default = None if one.is_optional else False
    named: dict[str, Any] = {"dest": one.name, "default": default}

    def default_alone(word: str) -> Any:
        return word if word == default else missing

    if one.kind == "bool":
        named["type"] = lambda word: read_truth(word, otherwise=missing)
        if default is not None:
            named |= {"nargs": "?", "const": True}
    else:
        named["type"] = ImportedName(one.kind) if one.kind else default_alone
        if one.is_list:
            named["nargs"] = "+"
    declare(walk, facts, [*flags, *one.aliases], named, node)
    if one.kind == "bool" and one.default is True:
        off = [f"--no_{one.name}", f"--no-{one.name.replace('_', '-')}"]
        named = {"dest": one.name, "action": "store_false", "default": False}
        declare(walk, facts, off, named, node)


def _field_of(walk: Expressions, name: str, node: ast.AnnAssign) -> DataclassField | None:
    """A field by its line; None for what is none, or is not made with."""
    kind, is_list, is_optional = _read_annotation(node.annotation)
    if kind in ("ClassVar", "InitVar"):
        return None
    if node.value is None:
        return DataclassField(name, kind, UNSTEADY, is_list, is_optional, is_required=True)
    call = node.value
    if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("field", "HfArg"))):
        default = walk.value(node.value, walk.module.scope)
        return DataclassField(name, kind, default, is_list, is_optional)
    said = {word.arg: word.value for word in call.keywords if word.arg}
    read = {key: walk.value(part, walk.module.scope) for key, part in said.items()}
    if read.get("init") is False:
        return None
    default, is_required = UNSTEADY, False
    if "default" in read:
        default = read["default"]
    elif "default_factory" in read:
        default = _call_factory(walk, read["default_factory"], call)
    else:
        is_required = True
    metadata = read.get("metadata")
    aliases = (metadata if isinstance(metadata, dict) else read).get("aliases", ())
    aliases = (aliases,) if isinstance(aliases, str) else aliases
    names = tuple(one for one in aliases if isinstance(one, str)) if aliases else ()
    return DataclassField(name, kind, default, is_list, is_optional, names, is_required)


def _call_factory(walk: Expressions, factory: Any, node: ast.Call) -> Any:
    if isinstance(factory, ImportedName) and factory.dotted in ("list", "dict"):
        return [] if factory.dotted == "list" else ScriptDict()
    if isinstance(factory, Unknown) and isinstance(factory.of, ast.Lambda):
        factory = function_of_lambda(factory.of, walk.module)
    made = walk.call_value(factory, [], {}, node)
    return UNSTEADY if isinstance(made, Unknown) else made


def _read_annotation(node: ast.expr) -> tuple[str, bool, bool]:
    """(what words are read as, whether they are several, whether None is allowed) of a type; empty
    for what no word is read as."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return "", False, False
    members = [part for part in _list_members(node) if not _is_none(part)]
    is_optional = len(members) < len(list(_list_members(node)))
    texts = [ast.unparse(part).rpartition(".")[2] for part in members]
    if len(members) == 2 and "str" in texts:  # such a parser takes the other one of the two
        members = [part for part, text in zip(members, texts, strict=True) if text != "str"]
    if len(members) != 1:
        return "", False, is_optional
    [only] = members
    if isinstance(only, ast.Subscript):
        outer = ast.unparse(only.value).rpartition(".")[2]
        if outer in _LISTS:
            kind, _, _ = _read_annotation(only.slice)
            return kind, True, is_optional
        if outer == "Literal":
            said = only.slice.elts if isinstance(only.slice, ast.Tuple) else [only.slice]
            texts_only = all(isinstance(p, ast.Constant) and isinstance(p.value, str) for p in said)
            return ("str" if texts_only else ""), False, is_optional
        return (outer if outer in ("ClassVar", "InitVar") else ""), False, is_optional
    name = ast.unparse(only).rpartition(".")[2]
    return (name if name in ("int", "float", "str", "bool") else ""), False, is_optional


def _list_members(node: ast.expr) -> Iterator[ast.expr]:
    """The types of a union; of another type itself, and None beside it where it is optional."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _list_members(node.left)
        yield from _list_members(node.right)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Union"):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            yield from _list_members(part)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Optional"):
        yield from _list_members(node.slice)
        yield ast.Constant(None)
    else:
        yield node


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _strip_call(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node
