"""The measurements as text, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torsh_trainer.bench.running import by_backend
from torsh_trainer.distributed.bench import FLAT, BenchPlan

_SIDE_BY_SIDE = 3
"""Backends that fit beside one another into 100 columns."""
_COLUMNS = (("time us", 10), ("algbw", 8), ("busbw", 8), ("wrong", 6))
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

Records = Sequence[Mapping[str, Any]]


def pages(records: Records, left_out: Mapping[str, str], plan: BenchPlan) -> Iterator[str]:
    """A table for every collective, then what the columns mean and who is missing."""
    blocks: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        blocks.setdefault((record["collective"], record["algorithm"]), []).append(record)
    for (collective, algorithm), block in blocks.items():
        backends = by_backend(block)
        for i in range(0, len(backends), _SIDE_BY_SIDE):
            yield _table(collective, algorithm, block, backends[i : i + _SIDE_BY_SIDE])
    if records:
        yield (
            f"time: mean over processes and up to {plan.iterations} repetitions. algbw: bytes / "
            "time. busbw: algbw times the\ncollective's factor (nccl-tests, doc/PERFORMANCE.md). "
            "Both in GB/s (10^9). wrong: elements that\nare not as they have to be."
        )
    for name, reason in left_out.items():
        yield f"{name}: left out: {reason}"


def _table(collective: str, algorithm: str, block: Records, backends: Sequence[str]) -> str:
    by_size: dict[int, dict[str, Mapping[str, Any]]] = {}
    for record in block:
        by_size.setdefault(record["bytes"], {})[record["backend"]] = record
    first = block[0]
    route = f" by {algorithm}" if algorithm not in ("", FLAT) else ""
    width = sum(columns for _, columns in _COLUMNS)
    names = "".join(f"{_place(block, name):>{width}}" for name in backends)
    heads = "".join(f"{head:>{columns}}" for head, columns in _COLUMNS) * len(backends)
    lines = [
        f"{collective}{route}, {first['dtype']}, {first['processes']} processes",
        f"{'':>9}{names}",
        f"{'size':>9}{heads}",
    ]
    for nbytes, row in sorted(by_size.items()):
        cells = "".join(_cells(row.get(name), width) for name in backends)
        lines.append(f"{size_words(nbytes):>9}{cells}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _place(block: Records, backend: str) -> str:
    device = next(record["device"] for record in block if record["backend"] == backend)
    return f"{backend} ({device})"


def _cells(record: Mapping[str, Any] | None, width: int) -> str:
    if record is None:
        return f"{'-':>{width}}"
    values = (
        _short(record["time_us"], 1),
        _short(record["algbw_gb_s"], 3),
        _short(record["busbw_gb_s"], 3),
        str(record["wrong"]),
    )
    return "".join(f"{value:>{w}}" for value, (_, w) in zip(values, _COLUMNS, strict=True))


def _short(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value < 1e4 else f"{value:.0f}"


def size_words(nbytes: int) -> str:
    """``64 KiB``, or the number of bytes where that is not whole."""
    for unit, name in _UNITS:
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return str(nbytes)
