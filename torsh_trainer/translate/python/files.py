"""Files of a script: what it reads, what it writes and hands on by name, and paths to both."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import PurePosixPath
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.python.events import place_of
from torsh_trainer.translate.python.objects import NOT_SET
from torsh_trainer.translate.python.omegaconf_calls import call_omegaconf
from torsh_trainer.translate.python.project import read_record, record_of
from torsh_trainer.translate.python.values import (
    ScriptDict,
    Thing,
    Unknown,
    compute,
    copy_record,
    is_plain,
)
from torsh_trainer.translate.python.walk import Walk
from torsh_trainer.translate.reading import read_root

_LOADS = (
    *("json.load", "json.loads", "hjson.load", "hjson.loads"),
    *("yaml.safe_load", "yaml.load", "yaml.full_load"),
)
"""What reads a configuration, of a file or of its text."""

_DUMPS = ("json.dump", "json.dumps", "hjson.dump", "hjson.dumps", "yaml.dump", "yaml.safe_dump")
"""What writes one, into a file or as text."""

_PATHS = ("pathlib.Path", "pathlib.PurePath", "pathlib.PosixPath")
_EXISTS = ("os.path.exists", "os.path.isfile")
_ENDINGS = (".json", ".hjson", ".yaml", ".yml")
_TEXT_METHODS = (
    *("replace", "lower", "upper", "strip", "lstrip", "rstrip", "split", "rsplit", "format"),
    *("startswith", "endswith", "removesuffix", "removeprefix", "join"),
)
_SAME_PATH = ("resolve", "absolute", "expanduser", "as_posix")

_OF_RANK = re.compile(
    r"(not )?[\w.]*(rank|is_(local_)?main_process|is_master|is_main)(\(\))?"
    r"( *(==|<=|in) *(0|[(\[](-1, 0|0, -1)[)\]]))?"
)
"""A condition on which process this is: what one of them writes, all of them read."""


class FileWalk(Walk):
    """``written``: files that the script has written so far, by ``name_path``, with what is in
    them: a dictionary, or an ``Unknown``."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.written: dict[str, Any] = {}

    def call_name(self, dotted: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        first = args[0] if args else None
        if dotted in ("open", "io.open"):
            return Thing("file", place_of(node), {"path": named.get("file", first)})
        if dotted in _LOADS:
            return self.load(first, node)
        if dotted in _DUMPS and args:
            file = args[1] if len(args) > 1 else named.get("fp", named.get("stream"))
            if isinstance(file, Thing) and file.kind == "file":
                self.write(file.facts["path"], first, node)
                return None
            return Thing("text", place_of(node), {"holds": copy_record(first)})
        if dotted in _PATHS and args and all(isinstance(arg, str) for arg in args):
            return str(PurePosixPath(*args))
        if ".OmegaConf." in dotted or dotted.startswith("OmegaConf."):
            found = call_omegaconf(self, dotted.rpartition(".")[2], args, named, node)
            return self.unknown(node) if found is NOT_SET else found
        if dotted in _EXISTS and isinstance(first, str) and self.exists(first):
            return True
        return super().call_name(dotted, args, named, node)

    def call_method(
        self, owner: Any, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        if isinstance(owner, Thing) and owner.kind == "file":
            if name in ("read", "read_text"):
                return owner
            if name == "write" and args:
                self.write(owner.facts["path"], args[0], node)
        if name == "write_text" and args and isinstance(owner, str | Unknown):
            self.write(owner, args[0], node)
        if isinstance(owner, str):
            return self.call_text(owner, name, args, named, node)
        return super().call_method(owner, name, args, named, node)

    def call_text(
        self, owner: str, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        """A method of a text, or of a path, which is its text here."""
        if name in ("open", "read_text"):
            return Thing("file", place_of(node), {"path": owner})
        if name in _SAME_PATH and not args:
            return owner
        if name in ("exists", "is_file") and self.exists(owner):
            return True
        if name == "joinpath" and all(isinstance(arg, str) for arg in args):
            return str(PurePosixPath(owner, *args))
        if name in _TEXT_METHODS and not named and all(map(is_plain, args)):
            return compute(getattr(owner, name), *args, otherwise=self.unknown(node))
        return self.unknown(node)

    def exists(self, path: str) -> bool:
        """Whether a configuration is surely there: the script has written it, or it is here."""
        if name_path(path) in self.written:
            return True
        if not path.lower().endswith(_ENDINGS) or self.find_file is None:
            return False
        return self.find_file(path) is not None

    def load(self, opened: Any, node: ast.Call) -> Any:
        """What a file or a text holds that the script reads as JSON or YAML."""
        if isinstance(opened, Thing) and opened.kind == "text":
            return copy_record(opened.facts["holds"])
        if isinstance(opened, str):
            return self.read_literal(opened, node)
        path = opened.facts.get("path") if isinstance(opened, Thing) else None
        if name_path(path) in self.written:
            return copy_record(self.written[name_path(path)])
        if isinstance(path, str):
            found = None if self.find_file is None else self.find_file(path)
            try:
                record = None if found is None else read_record(found)
            except (ConfigError, ResourceError):
                record = None
            if record is not None:
                return record
        if isinstance(path, str | Unknown):
            text = path if isinstance(path, str) else path.text
            self.event("load.missing", node, {"path": text, "is_known": isinstance(path, str)})
        return self.unknown(node)

    def write(self, path: Any, held: Any, node: ast.Call) -> None:
        """Keeps what the script puts into a file, so that it can be read under its name."""
        if isinstance(held, Thing) and held.kind == "text":
            held = held.facts["holds"]
        if isinstance(held, str):
            held = self.read_literal(held, node)
        sure = not self.around.under or _OF_RANK.fullmatch(self.around.under)
        if not sure or not isinstance(held, dict):
            held = self.unknown(node)
        self.written[name_path(path)] = copy_record(held)

    def read_literal(self, text: str, node: ast.Call) -> Any:
        """A configuration that stands in the script as a text; all of it where it is used."""
        try:
            root = read_root(text, name="text.json")
        except (ConfigError, ResourceError):
            return self.unknown(node)
        held = record_of(root, self.module.file)
        if isinstance(held, ScriptDict):
            _move(held, place_of(node), self.module.file)
            return held
        return self.unknown(node)


def name_path(path: Any) -> str:
    """By what a file is known that the script names: its path, or how the path is written."""
    if isinstance(path, str):
        return posixpath.normpath(path)
    return f"? {path.text}" if isinstance(path, Unknown) else ""


def _move(record: ScriptDict, place: Place, file: str) -> None:
    for key, value in record.items():
        record.places[key] = (place, file)
        if isinstance(value, ScriptDict):
            _move(value, place, file)
