"""Tables and numbers as the doors to checkpoints print them. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TextIO

from torsh_trainer.utils.files import strict_json
from torsh_trainer.utils.foreign import readable


def say(*lines: object, file: TextIO | None = None) -> None:
    """Prints lines in which names from files of others may stand."""
    print(*(readable(str(line)) for line in lines), sep="\n", file=file)


def print_json(value: object) -> None:
    """Prints ``value`` for programs, whole; what a terminal would obey is escaped as in JSON."""
    text = strict_json(value)
    print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def table(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "  "
) -> list[str]:
    """Lines with the cells below one another; columns in ``right`` end together."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (indent + "  ".join(_pad_cells(row, widths, right))).rstrip()
        for row in rows
    ]  # fmt: skip


def _pad_cells(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    return [
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def size(count: float | None) -> str:
    """Bytes in binary units: ``412 MiB``; ``-`` where nobody knows."""
    if count is None:
        return "-"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            whole = unit == "bytes" or count >= 100
            return f"{count:.0f} {unit}" if whole else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def number(value: object) -> str:
    """Four significant digits: ``0.08312``, ``4,812``, ``3e-05``; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def when(saved_at: str) -> str:
    """``2031-01-31 18:30:05``, in the reader's own time."""
    try:
        return datetime.fromisoformat(saved_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return saved_at


def count_words(count: int, word: str) -> str:
    """``1 tensor``, ``1,024 tensors``."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def flat(value: object, at: str = "") -> dict[str, object]:
    """A nest of dicts and lists as dotted names: ``groups[0].lr`` -> 0.001."""
    if isinstance(value, dict) and value:
        below = ((f"{at}.{key}" if at else str(key), item) for key, item in value.items())
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        below = ((f"{at}[{i}]", item) for i, item in enumerate(value))
    else:
        return {at: value}
    return {name: leaf for path, item in below for name, leaf in flat(item, path).items()}
