"""``hydra.main`` as scripts use it: a file of YAML, what its defaults take in, and the words of the
line laid over it."""

from __future__ import annotations

import ast
import re
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.python.arguments import read_setting
from torsh_trainer.translate.python.events import place_of
from torsh_trainer.translate.python.objects import NOT_SET
from torsh_trainer.translate.python.omegaconf_calls import merge_records, put_dotted, read_values
from torsh_trainer.translate.python.project import read_record
from torsh_trainer.translate.python.values import Function, ImportedName, ScriptDict, Unknown

_MAIN = "hydra.main"
_DEEPEST = 8
_OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[\w./@]+)=(?P<value>.*)", re.DOTALL)


def read_hydra(walk: Any, function: Function) -> dict[str, Any]:
    """The parameter of a function under ``hydra.main`` with its configuration; nothing where that
    decorates none, or where reading does not tell it."""
    for node in function.node.decorator_list:
        if not isinstance(node, ast.Call):
            continue
        called = walk.value(node.func, function.module.scope)
        if not isinstance(called, ImportedName) or called.dotted != _MAIN:
            continue
        order = ("config_path", "config_name", "version_base")
        given = [walk.value(arg, function.module.scope) for arg in node.args]
        said = dict(zip(order, given, strict=False))
        for word in node.keywords:
            if word.arg is not None:
                said[word.arg] = walk.value(word.value, function.module.scope)
        folder, name = said.get("config_path") or ".", said.get("config_name")
        parameters = function.node.args.args
        if isinstance(folder, str) and isinstance(name, str) and parameters:
            made = _Composition(walk, folder, node).compose(name)
            return {} if made is NOT_SET else {parameters[0].arg: made}
    return {}


class _Composition:
    """One configuration: the files below ``folder``, and the words of the line."""

    def __init__(self, walk: Any, folder: str, node: ast.Call) -> None:
        self.walk, self.folder, self.node = walk, folder, node
        self.overrides: dict[str, str] = {}
        for word in getattr(walk.arguments, "words", ()):
            match = _OVERRIDE.fullmatch(str(word))
            if match and match["sign"] != "~":
                walk.used.add(str(word))
                self.overrides[match["key"]] = match["value"]

    def compose(self, name: str) -> Any:
        """The whole configuration; ``NOT_SET`` where a file of it cannot be read."""
        found = self.read(name, depth=0)
        if not isinstance(found, ScriptDict):
            return NOT_SET
        for key, text in self.overrides.items():
            if self.open(f"{key}/{text}") is None:  # else it has chosen a file
                value = read_setting(text)
                several = "," in text and not text.startswith(("[", "(", "{", "'", '"'))
                hole = Unknown(f"{key}={text}", place_of(self.node))
                put_dotted(found, key, hole if several else value, self.node)
        return found

    def open(self, name: str) -> ScriptDict | None:
        find = self.walk.find_file
        path = None if find is None else find(f"{self.folder}/{name.removesuffix('.yaml')}.yaml")
        try:
            record = None if path is None else read_record(path)
        except (ConfigError, ResourceError):
            return None
        return read_values(record, self.node) if isinstance(record, ScriptDict) else None

    def read(self, name: str, *, depth: int) -> Any:
        """A file with what its defaults take in."""
        record = self.open(name)
        if record is None or depth > _DEEPEST:
            return NOT_SET
        defaults = record.pop("defaults", None)
        parts: list[Any] = []
        is_laid = False
        for entry in defaults if isinstance(defaults, list) else []:
            if entry == "_self_":
                parts.append(record)
                is_laid = True
                continue
            part = self.take_in(entry, name, depth)
            if part is NOT_SET:
                return NOT_SET
            parts.append(part)
        return merge_records([*parts, *([] if is_laid else [record])])

    def take_in(self, entry: Any, within: str, depth: int) -> Any:
        """What a line of a list of defaults adds: a file as it is, or a group's under its name."""
        beside = within.rpartition("/")[0]
        if isinstance(entry, str):
            return self.read(f"{beside}/{entry}" if beside else entry, depth=depth + 1)
        if not isinstance(entry, dict) or len(entry) != 1:
            return NOT_SET
        [(said, option)] = entry.items()
        group = said.removeprefix("override ").removeprefix("optional ").strip().lstrip("/")
        group, _, package = group.partition("@")
        if said.startswith("override") or group.startswith("hydra/") or package:
            return ScriptDict() if group.startswith("hydra/") else NOT_SET
        group = f"{beside}/{group}" if beside and not said.startswith("/") else group
        option = self.overrides.get(group, option)
        if option in (None, "null"):
            return ScriptDict()
        found = self.read(f"{group}/{option}", depth=depth + 1)
        if found is NOT_SET:
            return ScriptDict() if said.startswith("optional ") else NOT_SET
        made = ScriptDict()
        put_dotted(made, group.replace("/", "."), found, self.node)
        return made
