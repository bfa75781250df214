"""The measurements as one picture: time and bus bandwidth of every collective over its size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torsh_trainer.bench.running import by_backend
from torsh_trainer.bench.tables import size_words
from torsh_trainer.distributed.bench import FLAT
from torsh_trainer.report.charts import PALETTE

_ACROSS = 2
"""Collectives beside one another, each with two charts."""

Records = Sequence[Mapping[str, Any]]


def write_png(records: Records, path: Path) -> None:
    """Draws ``records`` into ``path``."""
    # Optional and slow to import. Figure itself, not pyplot: no display, no global state.
    from matplotlib.figure import Figure

    collectives = list(dict.fromkeys(str(record["collective"]) for record in records))
    series = list(dict.fromkeys(_series(record) for record in records))
    rows = math.ceil(len(collectives) / _ACROSS)
    across = min(_ACROSS, len(collectives))
    figure: Any = Figure(figsize=(6.6 * across, 2.5 * rows + 0.9), dpi=110, layout="constrained")
    grid = figure.subplots(rows, 2 * across, squeeze=False)
    for i in range(rows * across):
        left, right = grid[i // across][2 * (i % across) : 2 * (i % across) + 2]
        if i >= len(collectives):
            left.remove()
            right.remove()
            continue
        chosen = [record for record in records if record["collective"] == collectives[i]]
        _draw(left, chosen, series, "time_us", f"{collectives[i]}: time (us)")
        _draw(right, chosen, series, "busbw_gb_s", "bus bandwidth (GB/s)")
        _same_decades(left, records, "time_us")
        _same_decades(right, records, "busbw_gb_s")
    first = records[0]
    figure.suptitle(
        f"{first['processes']} processes, {first['dtype']}: {', '.join(by_backend(records))}",
        fontsize=10,
    )
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=min(6, len(lines)),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path)


def _series(record: Mapping[str, Any]) -> str:
    """What one line stands for: a backend, or a route of its all-reduce."""
    algorithm = record["algorithm"]
    return str(record["backend"]) + (f" {algorithm}" if algorithm not in ("", FLAT) else "")


def _same_decades(axes: Any, records: Records, value: str) -> None:
    """Every chart of one kind has the same axis, so that collectives can be compared."""
    values = [record[value] for record in records]
    if min(values) <= 0:  # the bus bandwidth of one process alone is zero
        return
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    axes.set_yscale("log")
    axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))


def _draw(axes: Any, records: Records, series: Sequence[str], value: str, title: str) -> None:
    for number, name in enumerate(series):
        points = sorted((r["bytes"], r[value]) for r in records if _series(r) == name)
        if points:
            at, values = zip(*points, strict=True)
            axes.plot(
                at,
                values,
                label=name,
                color=PALETTE[number % len(PALETTE)][0],
                marker="o",
                markersize=3,
                linewidth=1.4,
            )
    axes.set_xscale("log", base=2)
    sizes = sorted({record["bytes"] for record in records})
    shown = sizes[:: max(1, math.ceil(len(sizes) / 5))]
    axes.set_xticks(shown, [size_words(size) for size in shown], fontsize=7)
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(title, loc="left", fontsize=9)
    axes.grid(color="#e8ebf0", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
