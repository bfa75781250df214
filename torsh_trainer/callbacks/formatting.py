"""Numbers and facts as people read them."""

from __future__ import annotations

import math
from pathlib import Path

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.utils.foreign import escape_controls
from torsh_trainer.utils.masking import mask_url


def number(value: object) -> str:
    """Four significant digits, thousands separated: ``0.08312``, ``4,812``, ``3e-05``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """``0:00:41``, ``2 d 03:12:00``."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, minutes, left = rest // 3600, rest // 60 % 60, rest % 60
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{left:02}"
    return f"{hours}:{minutes:02}:{left:02}"


def size(count: float) -> str:
    """Bytes in binary units: ``412 MiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return (
                f"{count:.0f} {unit}" if count >= 100 or unit == "bytes" else f"{count:.3g} {unit}"
            )
        count /= 1024
    return f"{count:.4g} TiB"


def nearby(path: str | Path) -> str:
    """``path`` as seen from the current directory, where it lies below it."""
    path, url = Path(path), mask_url(str(path))
    return escape_controls(
        str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else url)
    )


def batch_arithmetic(info: RunInfo) -> str:
    """``64 = 16 micro x 2 accumulate x 2 processes``."""
    if not info.batch_size:
        return f"as the task's loaders say, x {info.accumulate} accumulate x {info.world.size}"
    copies = max(1, info.batch_size // (info.micro_batch_size * info.accumulate))
    word = "process" if copies == 1 else "processes"
    if copies != info.world.size:
        word = "data-parallel copies"
    return (
        f"{info.batch_size} = {info.micro_batch_size} micro x {info.accumulate} accumulate "
        f"x {copies} {word}"
    )


def banner(info: RunInfo) -> list[tuple[str, str]]:
    """What a run is made of: (word, facts) lines."""
    world = info.world
    processes = "1 process" if world.size == 1 else f"{world.size} processes"
    nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
    backend = f" over {info.backend}" if world.size > 1 else ""
    threads = "1 thread" if info.threads == 1 else f"{info.threads} threads"
    lines = [
        ("strategy", f"{info.strategy}, {processes}{nodes}{backend}"),
        ("device", f"{info.device}, {threads} per process"),
        ("precision", "; ".join(filter(None, (info.precision, info.numerics)))),
        ("batch", batch_arithmetic(info)),
        *([("length", _length(info))] if info.trains else []),
        ("model", _parameters(info)),
        *info.notes.items(),
    ]
    if info.trains and 0 < info.normalised < info.batch_size:
        told = f"normalises {info.normalised} samples at a time, not all {info.batch_size}"
        lines.insert(4, ("batch norm", told))
    if info.loader_processes:
        word = "process" if info.loader_processes == 1 else "processes"
        lines.append(("loading", f"{info.loader_processes} loader {word} for each process"))
    if info.first_step:
        lines.append(("resumed", f"after step {info.first_step:,}"))
    if info.run_dir is not None:
        lines.append(("run", nearby(info.run_dir)))
    return lines


def _length(info: RunInfo) -> str:
    total = info.total_steps or info.max_steps
    parts = [] if total is None else [f"{total:,} steps"]
    if info.max_time_s is not None:
        parts.append(f"at most {duration(info.max_time_s)}")
    epoch = f", {info.steps_per_epoch:,} steps an epoch" if info.steps_per_epoch else ""
    return (" or ".join(parts) or "no bound") + epoch


def _parameters(info: RunInfo) -> str:
    trained = info.trainable_parameters
    rest = "" if trained == info.parameters else f", {trained:,} of them trainable"
    return f"{info.parameters:,} parameters{rest}"
