"""Modules of a script's own project: files beside it, and in the folders around it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.nodes import Node
from torsh_trainer.translate.python.parsing import parse
from torsh_trainer.translate.python.values import ScriptDict
from torsh_trainer.translate.reading import read_root, text_of

_FOLDERS_ABOVE = 3
_MOST_FILES = 40
_MOST_BYTES = 400_000
_NAMED = 4
_INSTALLED = ("site-packages", "dist-packages")


@dataclass
class ScriptProject:
    """Finds what a script imports from its own project, as ``FindModule`` says.

    ``files`` are those that were read, ``unread`` those that could not be, with the reason;
    ``opened`` are configurations that the script reads, and that were found.
    """

    script: Path
    files: dict[Path, ast.Module | None] = field(default_factory=dict)
    opened: dict[str, None] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    located: dict[tuple[str, Path], Path | None] = field(default_factory=dict)
    names: dict[str, Path] = field(default_factory=dict)

    def find_module(self, dotted: str, importer: str) -> tuple[str, ast.Module] | None:
        """The file and the tree of a module; None where it is not the project's."""
        asked = (dotted, self._place_of(importer))
        if asked not in self.located:
            path = self._locate(*asked)
            itself = path is not None and path.resolve() == self.script.resolve()
            self.located[asked] = None if itself else path
        path = self.located[asked]
        if path is None:
            return None
        if path not in self.files:
            self.files[path] = self._read(path)
        tree = self.files[path]
        if tree is None:
            return None
        name = self._name_of(path)
        self.names[name] = path.absolute()
        return name, tree

    def find_file(self, name: str) -> Path | None:
        """A file that the script opens: from here, beside it, or in the folders above."""
        path = Path(name)
        above = list(self.script.absolute().parents)
        places = [path] if path.is_absolute() else [f / path for f in (Path(), *above[:4])]
        found = next((place for place in places if _is_file(place)), None)
        if found is not None:
            self.opened[str(found)] = None
        return found

    def _locate(self, dotted: str, importer: Path) -> Path | None:
        level = len(dotted) - len(dotted.lstrip("."))
        parts = [part for part in dotted.lstrip(".").split(".") if part]
        if not parts or not all(part.isidentifier() for part in parts):
            return None
        if level:
            roots = [[importer.parent, *importer.parents[1:]][level - 1]]
        else:
            above = list(self.script.absolute().parents)
            roots = [self.script.parent, *above[1 : 1 + _FOLDERS_ABOVE]]
        for root in roots:
            for path in (
                root.joinpath(*parts).with_suffix(".py"),
                root.joinpath(*parts, "__init__.py"),
            ):
                if path.is_file() and not any(part in _INSTALLED for part in path.parts):
                    return path
        return None

    def _read(self, path: Path) -> ast.Module | None:
        self.bytes += path.stat().st_size
        if len(self.files) >= _MOST_FILES or self.bytes > _MOST_BYTES:
            self.unread[self._name_of(path)] = "the project is larger than is read"
            return None
        try:
            return parse(text_of(path), name=str(path))
        except (ConfigError, ResourceError) as error:
            self.unread[self._name_of(path)] = error.sentence
            return None

    def _place_of(self, importer: str) -> Path:
        if not importer:
            return self.script.absolute()
        return self.names.get(importer, self.script)

    def _name_of(self, path: Path) -> str:
        """As seen from the script's folder."""
        try:
            return str(path.absolute().relative_to(self.script.absolute().parent))
        except ValueError:
            return str(path)


def note_unread(project: ScriptProject) -> list[str]:
    """Words on the modules that were not read, by the reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in project.unread.items():
        reasons.setdefault(why, []).append(name)
    return [
        f"not read: {', '.join(names[:_NAMED])}"
        f"{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}: {why}"
        for why, names in reasons.items()
    ]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_record(path: Path) -> Any:
    """What a JSON or YAML file holds, as a script has it; None where it is no mapping.

    Raises:
        ConfigError, ResourceError: it cannot be read.
    """
    root = read_root(text_of(path), name=str(path))
    return record_of(root, str(path)) if root.is_mapping else None


def record_of(node: Node, file: str) -> Any:
    """A value of a configuration file as a script holds it, with the places of its keys."""
    if node.is_mapping:
        record = ScriptDict()
        for key, entry in node.value.items():
            record.put(key, record_of(entry.node, file), entry.place, file)
        return record
    if node.is_list:
        return [record_of(item, file) for item in node.value]
    return node.value
