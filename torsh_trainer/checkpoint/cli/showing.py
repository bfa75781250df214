"""What ``checkpoint show`` says of one checkpoint: as text for a terminal, or as plain values."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torsh_trainer.checkpoint.cli.contents import Contents, TensorEntry
from torsh_trainer.checkpoint.cli.printing import (
    count_words,
    flat,
    number,
    size,
    table,
    when,
)
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.utils.foreign import shorten
from torsh_trainer.utils.lookup import matching

_LISTED_ONE_BY_ONE = 24
"""A part with more tensors is shown by families, unless all are asked for."""

_SHOWN_ABOVE = ("engine", "position", "schedule")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


class _Family(NamedTuple):
    """Tensors that differ in the numbers of their names alone: ``blocks.*.norm.weight``."""

    name: str
    entries: list[TensorEntry]


def select_entries(contents: Contents, pattern: str | None) -> list[TensorEntry]:
    """The tensors whose name, with or without what leads to it, matches ``pattern`` (fnmatch).

    Raises:
        ConfigError: none does.
    """
    if pattern is None:
        return list(contents.entries)
    names = {entry.full_name: entry for entry in contents.entries}
    names |= {f"{entry.part}: {entry.name}": entry for entry in contents.entries}
    short = {entry.name for entry in contents.entries}
    found = {*matching(pattern, names), *matching(pattern, short)}
    if not found:
        offer = nearest(pattern.strip("*"), short)
        if not offer.startswith("did you mean"):
            offer = "patterns are as in a shell: --only 'head.*', --only '*.exp_avg'"
        raise ConfigError(f"--only {pattern!r} matches no tensor of {contents.path}", fix=offer)
    return [
        entry
        for entry in contents.entries
        if {entry.name, entry.full_name, f"{entry.part}: {entry.name}"} & found
    ]


def as_text(
    contents: Contents, entries: Sequence[TensorEntry], *, every: bool, pieces: bool, width: int
) -> list[str]:
    """Lines: the facts, then tensors by the part that they belong to.

    With ``every`` no two tensors share a line; ``pieces`` adds a line for each piece of each.
    Of a selection of tensors the facts are left out.
    """
    lines = [str(contents.path)]
    if len(entries) == len(contents.entries):
        lines += _facts(contents, width)
    for part, members in _parts(entries).items():
        lines += ["", _heading(part, members)]
        families = [_Family(entry.name, [entry]) for entry in members]
        if not (every or pieces) and (len(members) > _LISTED_ONE_BY_ONE or members[0].slot):
            families = _families(members)
        lines += _table(families, pieces=pieces, width=width)
    return [*lines, "", _heading("total", entries)]


def as_values(contents: Contents, entries: Iterable[TensorEntry]) -> dict[str, Any]:
    """The same as plain values; ``plain`` is all that a checkpoint holds beside tensors."""
    manifest = contents.manifest
    return {
        "path": str(contents.path),
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "facts": dict(manifest.facts),
        "metrics": dict(manifest.metrics),
        "files": {name: file.size_bytes for name, file in manifest.files.items()},
        "plain": contents.plain,
        "tensors": [
            {
                "name": entry.full_name,
                "part": entry.part,
                "shape": list(entry.shape),
                "dtype": _dtype(entry),
                "size_bytes": entry.size_bytes,
                "pieces": [
                    {"offset": list(p.offset), "shape": list(p.shape), "file": p.file}
                    for p in entry.pieces
                ],
            }
            for entry in entries
        ],
    }


def _facts(contents: Contents, width: int) -> list[str]:
    manifest, plain = contents.manifest, contents.plain
    facts = dict(manifest.facts)
    versions = [f"{name} {facts.pop(name)}" for name in ("torsh_trainer", "torch") if name in facts]
    total = sum(file.size_bytes for file in manifest.files.values())
    rows = [
        ("saved", f"{when(manifest.saved_at)} by {_processes(manifest.world_size)}"),
        *((name, str(value)) for name, value in facts.items()),
        ("versions", ", ".join(versions)),
        ("on the disk", f"{size(total)} in {count_words(len(manifest.files), 'file')}"),
        ("position", _settings(plain.get("position", {}))),
        ("metrics", _settings(manifest.metrics)),
        *_schedule(plain.get("schedule", {})),
    ]
    for name, optimizer in contents.optimizers.items():
        groups = optimizer.get("groups", [])
        for i, group in enumerate(groups):
            title = f"optimizer {name}" if i == 0 else ""
            rows.append((title, _group(group, order=groups[0])))
    for name, value in {**plain.get("engine", {}), **plain}.items():
        if name not in (*_SHOWN_ABOVE, "model", "optimizer") and flat(value) != {"": value}:
            rows.append((name, _others(value)))
    room = max(30, width - max(len(name) for name, _ in rows) - 4)
    wrapped = [
        (name if i == 0 else "", line)
        for name, told in rows
        for i, line in enumerate(textwrap.wrap(told, room, subsequent_indent="  "))
    ]
    return table(wrapped)


def _schedule(schedule: Mapping[str, Any]) -> list[tuple[str, str]]:
    base = schedule.get("base") or []
    rates = ", ".join(number(rate) for rate in base)
    running = ", ".join(schedule.get("running") or {})
    told = [f"base rates {rates}" if rates else "", f"state of {running}" if running else ""]
    return [("schedule", "; ".join(filter(None, told)))]


def _group(group: Mapping[str, Any], *, order: Iterable[str]) -> str:
    settings = {
        key: value
        for key in dict.fromkeys([*order, *group])
        if key not in ("params", "param_names")
        and (value := group.get(key)) is not None
        and value is not False
    }
    return f"{count_words(len(group.get('params', ())), 'parameter')}: {_settings(settings)}"


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value, value))})"
    return number(value)


def _others(value: Any) -> str:
    """A few values as they are, many by their number."""
    leaves = {name: leaf for name, leaf in flat(value).items() if leaf not in ({}, [])}
    told = ", ".join(f"{name} {_value(leaf)}" for name, leaf in leaves.items())
    return told if len(told) <= 70 else f"{count_words(len(leaves), 'value')} (--json prints them)"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _parts(entries: Iterable[TensorEntry]) -> dict[str, list[TensorEntry]]:
    parts: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        parts.setdefault(entry.part, []).append(entry)
    return parts


def _families(entries: Iterable[TensorEntry]) -> list[_Family]:
    """Slots of an optimizer together, others by the pattern of their names."""
    families: dict[tuple[Any, ...], _Family] = {}
    for entry in entries:
        key: tuple[Any, ...]
        if entry.slot:
            name, key = f"*.{entry.slot}", (entry.slot, entry.dtype)
        else:
            name = _NUMBER.sub("*", entry.name)
            key = (name, entry.dtype, entry.shape)
        families.setdefault(key, _Family(name, [])).entries.append(entry)
    return [
        _Family(family.entries[0].name, family.entries) if len(family.entries) == 1 else family
        for family in families.values()
    ]


def _table(families: Sequence[_Family], *, pieces: bool, width: int) -> list[str]:
    rows = [
        [
            family.name,
            _shape(family.entries),
            _dtype(family.entries[0]),
            size(sum(entry.size_bytes for entry in family.entries)),
            _name_files(family.entries),
        ]
        for family in families
    ]
    head = ["tensor", "shape", "dtype", "size", "files"]
    others = max(sum(map(len, row[1:])) for row in [head, *rows]) + 10
    rows = [[shorten(row[0], max(20, width - others)), *row[1:]] for row in rows]
    lines = table([head, *rows], right=(3,))
    if not pieces:
        return lines
    told = lines[:1]
    for family, line in zip(families, lines[1:], strict=True):
        told += [
            line,
            *(f"      {_cut(piece)} in {piece.file}" for piece in family.entries[0].pieces),
        ]
    return told


def _shape(entries: Sequence[TensorEntry]) -> str:
    """``10 x 128``; ``8 tensors`` of shapes that differ; ``12 of 10 x 128``."""
    shapes = {entry.shape for entry in entries}
    if len(shapes) > 1:
        return f"{len(entries)} tensors"
    shape = " x ".join(map(str, entries[0].shape)) or "scalar"
    return shape if len(entries) == 1 else f"{len(entries)} of {shape}"


def _name_files(entries: Iterable[TensorEntry]) -> str:
    """The files that hold a piece, few by name: ``__0_0, __1_0``, or ``__0_0 ... __7_0``."""
    files = sorted({p.file for entry in entries for p in entry.pieces}, key=_natural)
    names = [file.removesuffix(".distcp") for file in files]
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _cut(piece: Any) -> str:
    ranges = (f"{at}:{at + n}" for at, n in zip(piece.offset, piece.shape, strict=True))
    return f"[{', '.join(ranges)}]"


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _heading(part: str, entries: Sequence[TensorEntry]) -> str:
    count = sum(entry.numbers for entry in entries)
    bytes_ = sum(entry.size_bytes for entry in entries)
    tensors = count_words(len(entries), "tensor")
    return f"{part}: {tensors}, {count_words(count, 'number')}, {size(bytes_)}"


def _dtype(entry: TensorEntry) -> str:
    return str(entry.dtype).removeprefix("torch.")
