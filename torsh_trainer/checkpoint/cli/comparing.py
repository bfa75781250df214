"""Two checkpoints side by side: the largest differences of tensors, and values that differ.

Tensors are read one after another and compared in blocks, so that the memory needed is that of the
largest tensor of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.checkpoint.cli.contents import Contents, TensorEntry
from torsh_trainer.checkpoint.cli.printing import count_words, flat, number, table
from torsh_trainer.checkpoint.cli.showing import select_entries
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils.foreign import shorten

_BLOCK = 1 << 20
"""So many numbers of a tensor are compared at a time, in float64."""

_VALUES_SHOWN = 40


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs: the largest ``|a - b|``, the largest ``|a - b| / max(|a|, |b|)``.

    ``differing`` of ``numbers`` are not equal (NaN equals NaN). Both are infinite where one of
    two numbers alone is not finite, and None where there is no sense in subtracting: bytes.
    """

    part: str
    name: str
    full_name: str
    numbers: int
    differing: int
    absolute: float | None
    relative: float | None


@dataclass(frozen=True)
class CheckpointComparison:
    """All that differs between two checkpoints; ``changed`` has shapes and types that do."""

    paths: tuple[str, str]
    compared: Mapping[str, int]
    differences: Sequence[TensorDifference]
    changed: Mapping[str, tuple[str, str]]
    only: tuple[Sequence[str], Sequence[str]]
    values: Mapping[str, tuple[Any, Any]]

    @property
    def same(self) -> bool:
        """Nothing differs."""
        return not (self.differences or self.changed or any(self.only) or self.values)


def compare(one: Contents, other: Contents, *, pattern: str | None = None) -> CheckpointComparison:
    """Compares tensors (those whose name matches ``pattern``), and, without one, plain values.

    Raises:
        ConfigError: ``pattern`` matches no tensor of either.
        OSError: the disk refused.
    """
    mine, theirs = _select_in_both(one, other, pattern)
    both = [name for name in mine if name in theirs]
    changed = {
        name: (_kind(mine[name]), _kind(theirs[name]))
        for name in both
        if _kind(mine[name]) != _kind(theirs[name])
    }
    alike = [name for name in both if mine[name].shape == theirs[name].shape]
    pairs = zip(
        one.read(mine[name] for name in alike),
        other.read(theirs[name] for name in alike),
        strict=True,
    )
    found = [_difference(entry, a, b) for (entry, a), (_, b) in pairs]
    compared: dict[str, int] = {}
    for name in both:
        compared[mine[name].part] = compared.get(mine[name].part, 0) + 1
    return CheckpointComparison(
        paths=(str(one.path), str(other.path)),
        compared=compared,
        differences=[difference for difference in found if difference.differing],
        changed=changed,
        only=([n for n in mine if n not in theirs], [n for n in theirs if n not in mine]),
        values=_values(one, other) if pattern is None else {},
    )


def as_values(found: CheckpointComparison) -> dict[str, Any]:
    """The comparison as plain values, for scripts."""
    return {
        "a": found.paths[0],
        "b": found.paths[1],
        "same": found.same,
        "tensors_in_both": sum(found.compared.values()),
        "differences": [
            {
                "name": difference.full_name,
                "numbers": difference.numbers,
                "differing": difference.differing,
                "absolute": difference.absolute,
                "relative": difference.relative,
            }
            for difference in found.differences
        ],
        "changed": {name: list(kinds) for name, kinds in found.changed.items()},
        "only_in_a": list(found.only[0]),
        "only_in_b": list(found.only[1]),
        "values": {name: list(pair) for name, pair in found.values.items()},
    }


def as_text(found: CheckpointComparison, *, top: int, by: str, width: int) -> list[str]:
    """Lines: what differs, the ``top`` largest differences first (``by`` absolute or relative)."""
    lines = [f"a  {found.paths[0]}", f"b  {found.paths[1]}"]
    if found.same:
        return [
            *lines,
            f"the same: {count_words(sum(found.compared.values()), 'tensor')}, every value",
        ]
    lines += ["", *_summary(found)]
    if found.differences:
        lines += ["", *_largest(found.differences, top=top, by=by, width=width)]
    for letter, names in zip("ab", found.only, strict=True):
        lines += _names(f"only in {letter}", names, top)
    told = [f"{name}  ({a} in a, {b} in b)" for name, (a, b) in found.changed.items()]
    lines += _names("other shapes or types", told, top)
    if found.values:
        lines += ["", *_value_table(found.values, width=width)]
    return lines


def _summary(found: CheckpointComparison) -> list[str]:
    rows = []
    for part, count in found.compared.items():
        mine = [difference for difference in found.differences if difference.part == part]
        verb = "differs" if count == 1 else "differ"
        worst = max((d.absolute for d in mine if d.absolute is not None), default=None)
        rows.append(
            [
                part,
                f"{len(mine):,} of {count_words(count, 'tensor')} {verb}" if mine else "the same",
                "" if worst is None else f"by up to {number(worst)}",
            ]
        )
    return table(rows) or ["  no tensor in common"]


def _largest(
    differences: Sequence[TensorDifference], *, top: int, by: str, width: int
) -> list[str]:
    # Scalars count steps: they would hide what was trained.
    ordered = sorted(differences, key=lambda d: (d.numbers > 1, _rank(getattr(d, by))))[::-1]
    rows = [
        [
            f"{difference.part}: {difference.name}",
            _number(difference.absolute),
            _number(difference.relative),
            f"{difference.differing:,} of {difference.numbers:,}",
        ]
        for difference in ordered[:top]
    ]
    head = ["tensor", "largest", "relative", "numbers that differ"]
    others = max(sum(map(len, row[1:])) for row in [head, *rows]) + 10
    rows = [[shorten(row[0], max(24, width - others)), *row[1:]] for row in rows]
    lines = table([head, *rows], right=(1, 2, 3))
    return [*lines, *_more(len(differences), top)]


def _names(title: str, names: Sequence[str], top: int) -> list[str]:
    if not names:
        return []
    listed = [f"  {name}" for name in names[:top]]
    return ["", f"{title}: {len(names)}", *listed, *_more(len(names), top)]


def _more(count: int, top: int) -> list[str]:
    return [f"  and {count - top:,} more (--top {count})"] if count > top else []


def _value_table(values: Mapping[str, tuple[Any, Any]], *, width: int) -> list[str]:
    values = _fold_one_sided(values)
    room = max(20, (width - max(map(len, values)) - 8) // 2)
    rows = [
        [name, shorten(_describe_value(a), room), shorten(_describe_value(b), room)]
        for name, (a, b) in list(values.items())[:_VALUES_SHOWN]
    ]
    more = len(values) - len(rows)
    lines = table([["value", "a", "b"], *rows])
    return [*lines, f"  and {more:,} more (--json has them)"] if more else lines


def _fold_one_sided(values: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Parts that only one of the two has share a line: ``config`` -> 161 values."""
    parts: dict[str, dict[str, tuple[Any, Any]]] = {}
    for name, pair in values.items():
        parts.setdefault(name.partition(".")[0], {})[name] = pair
    folded: dict[str, tuple[Any, Any]] = {}
    for part, members in parts.items():
        missing = [all(pair[side] is _ABSENT for pair in members.values()) for side in (0, 1)]
        if len(members) > 1 and any(missing):
            told = _Words(count_words(len(members), "value"))
            folded[part] = (_ABSENT, told) if missing[0] else (told, _ABSENT)
        else:
            folded |= members
    return folded


def _describe_value(value: Any) -> str:
    if isinstance(value, bytes):  # of a random stream: nobody reads them
        return count_words(len(value), "byte")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str) and not isinstance(value, _Words) else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)


def _rank(value: float | None) -> float:
    return -1.0 if value is None else value


def _select_in_both(
    one: Contents, other: Contents, pattern: str | None
) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    found: list[dict[str, TensorEntry]] = []
    missed: list[ConfigError] = []
    for contents in (one, other):
        try:
            entries: Iterable[TensorEntry] = select_entries(contents, pattern)
        except ConfigError as error:
            missed.append(error)
            entries = ()
        found.append({entry.full_name: entry for entry in entries})
    if len(missed) == 2:
        raise missed[0]
    return found[0], found[1]


def _kind(entry: TensorEntry) -> str:
    return f"{list(entry.shape)} {str(entry.dtype).removeprefix('torch.')}"


def _difference(entry: TensorEntry, a: Tensor, b: Tensor) -> TensorDifference:
    differing, absolute, relative = 0, 0.0, 0.0
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat_a.numel(), _BLOCK):
        x, y = _wide(flat_a[start : start + _BLOCK]), _wide(flat_b[start : start + _BLOCK])
        unequal = (x != y) & ~(x.isnan() & y.isnan())
        count = int(unequal.sum())
        if not count:
            continue
        differing += count
        x, y = x[unequal], y[unequal]
        distance = (x - y).abs()
        scale = torch.maximum(x.abs(), y.abs())
        absolute = max(absolute, _largest_of(distance))
        relative = max(relative, _largest_of(distance / scale))
    measured = a.dtype.is_floating_point or a.dtype.is_complex or a.dtype.itemsize > 1
    return TensorDifference(
        part=entry.part,
        name=entry.name,
        full_name=entry.full_name,
        numbers=entry.numbers,
        differing=differing,
        absolute=absolute if measured else None,
        relative=relative if measured else None,
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _largest_of(values: Tensor) -> float:
    """The maximum; infinite where a difference is none (infinity less infinity, or NaN)."""
    return float(torch.nan_to_num(values, nan=math.inf, posinf=math.inf).max())


class _Words(str):
    """Words in place of a value."""

    __slots__ = ()


_ABSENT = _Words("-")


def _values(one: Contents, other: Contents) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> both values, of what the two do not have in common."""
    mine, theirs = _leaves(one), _leaves(other)
    return {
        name: (mine.get(name, _ABSENT), theirs.get(name, _ABSENT))
        for name in {**mine, **theirs}
        if not _equal(mine.get(name, _ABSENT), theirs.get(name, _ABSENT))
    }


def _leaves(contents: Contents) -> dict[str, Any]:
    manifest = contents.manifest
    facts = {"world_size": manifest.world_size, **manifest.facts}
    leaves = {**flat({"facts": facts, "metrics": dict(manifest.metrics)}), **flat(contents.plain)}
    return {name: leaf for name, leaf in leaves.items() if leaf not in ({}, [])}


def _equal(a: Any, b: Any) -> bool:
    """As values of one kind: 1 is not True, and NaN is NaN."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and bool(a == b)
