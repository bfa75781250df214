"""OmegaConf as scripts use it: files of YAML, merged with one another and with the line's words."""

from __future__ import annotations

import ast
import re
from typing import Any

from torsh_trainer.translate.python.arguments import read_setting
from torsh_trainer.translate.python.events import place_of
from torsh_trainer.translate.python.objects import NOT_SET
from torsh_trainer.translate.python.values import (
    Attributes,
    Kind,
    ScriptDict,
    Thing,
    Unknown,
    copy_record,
)

_FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+")
"""What YAML of version 1.1 has as a text, and OmegaConf as a number: ``1e-4``."""

_COPIES = ("create", "structured", "to_container", "to_object", "to_yaml")


def call_omegaconf(
    walk: Any, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
) -> Any:
    """The value of ``OmegaConf.name(...)``; ``NOT_SET`` where reading does not tell it."""
    first = args[0] if args else named.get("file_", named.get("obj"))
    if name == "load":
        opened = (
            first if isinstance(first, Thing) else Thing("file", place_of(node), {"path": first})
        )
        loaded = walk.load(opened, node)
        return read_values(loaded, node) if isinstance(loaded, ScriptDict) else loaded
    if name == "from_cli" and not args:
        return read_dotlist(getattr(walk.arguments, "words", ()), node)
    if name in ("from_dotlist", "from_cli") and isinstance(first, list):
        words = [word for word in first if isinstance(word, str)]
        return read_dotlist(words, node) if len(words) == len(first) else NOT_SET
    if name in ("merge", "unsafe_merge"):
        return merge_records([_record_of(walk, arg, node) for arg in args])
    if name in _COPIES and name != "to_yaml":
        found = (
            ScriptDict() if first is None and name == "create" else _record_of(walk, first, node)
        )
        return copy_record(found) if isinstance(found, ScriptDict | list) else NOT_SET
    if name == "update" and len(args) > 2 and isinstance(first, ScriptDict):
        put_dotted(first, str(args[1]), walk.sure(args[2], node), node)
        return None
    if name == "select" and isinstance(first, ScriptDict) and len(args) > 1:
        return select_dotted(first, str(args[1]))
    return NOT_SET


def read_values(record: Any, node: ast.AST) -> Any:
    """Values as OmegaConf reads them: ``1e-4`` is a number, and ``${...}`` is not followed."""
    if isinstance(record, ScriptDict):
        for key, value in record.items():
            record[key] = read_values(value, node)
        return record
    if isinstance(record, list):
        return [read_values(item, node) for item in record]
    if isinstance(record, str) and "${" in record:
        return Unknown(record, place_of(node))
    if isinstance(record, str) and _FLOAT.fullmatch(record):
        return float(record)
    return record


def read_dotlist(words: Any, node: ast.AST) -> ScriptDict:
    """``train.lr=1e-3 train.epochs=2`` as a record; other words are passed over."""
    record = ScriptDict()
    for word in words:
        key, equals, text = str(word).partition("=")
        if equals and re.fullmatch(r"[A-Za-z_][\w.]*", key):
            put_dotted(record, key, read_setting(text), node)
    return record


def put_dotted(record: ScriptDict, dotted: str, value: Any, node: ast.AST) -> None:
    """``record.a.b = value``."""
    *above, last = dotted.split(".")
    for part in above:
        if not isinstance(record.get(part), ScriptDict):
            record.put(part, ScriptDict(), place_of(node), "")
        record = record[part]
    record.put(last, value, place_of(node), "")


def select_dotted(record: Any, dotted: str) -> Any:
    """``record.a.b``; ``NOT_SET`` where it has none."""
    for part in dotted.split("."):
        if not isinstance(record, ScriptDict) or part not in record:
            return NOT_SET
        record = record.read(part)
    return record


def merge_records(records: list[Any]) -> Any:
    """The records laid over one another, the last counts; ``NOT_SET`` where one is not known."""
    if not records or not all(isinstance(one, ScriptDict) for one in records):
        return NOT_SET
    merged: ScriptDict = copy_record(records[0])
    for one in records[1:]:
        _lay_over(merged, one)
    return merged


def _lay_over(below: ScriptDict, above: ScriptDict) -> None:
    for change in above.untold:
        below.mark_untold(*change)
    for key, value in above.items():
        inner = below.get(key)
        if isinstance(inner, ScriptDict) and isinstance(value, ScriptDict):
            _lay_over(inner, value)
        else:
            below.put(key, copy_record(value), *above.places.get(key, below.places.get(key, _NONE)))


_NONE = (NOT_SET.place, "")


def _record_of(walk: Any, value: Any, node: ast.Call) -> Any:
    """A dataclass, an object of one, or a record, as a record."""
    if isinstance(value, Kind):
        value = walk.make(value, [], {}, node)
    if isinstance(value, Thing) and value.kind in ("object", "arguments") and not value.is_untold:
        held = ScriptDict(Attributes(value))
        for key, inner in held.items():
            held[key] = _record_of(walk, inner, node)
        return held
    return value
