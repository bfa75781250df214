"""How long the device has nothing to do within a run's steps, by torch's profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.size import Tokens, size_for
from benchmarks.gpu.throughput import torsh

WARM, WATCHED = 10, 20
"""Steps before the profiler begins, and those that it sees."""


def idle_share(busy: Iterable[tuple[float, float]]) -> float:
    """The part of the time from the first beginning to the last end in which nothing was busy.

    Raises:
        ValueError: nothing was ever busy.
    """
    spans = sorted(busy)
    if not spans:
        raise ValueError("the profiler saw nothing on the device")
    first, until = spans[0][0], spans[0][0]
    working = 0.0
    for began, ended in spans:
        working += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return 1.0 - working / (until - first) if until > first else 0.0


def measure(device: str) -> dict[str, Any]:
    """The share for this product's run; on a CPU operators stand for kernels."""
    size = size_for(device)
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    watch = profile(activities=[kind])

    def on_fetch(number: int) -> None:
        if number == WARM:
            watch.start()
        elif number == WARM + WATCHED:
            if device == "cuda":
                torch.cuda.synchronize()
            watch.stop()

    data = Tokens(size, device, on_fetch=on_fetch)
    with tempfile.TemporaryDirectory() as folder:
        torsh(data, size, device, WARM + WATCHED + 5, Path(folder))
    wanted = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    busy = [
        (event.time_range.start, event.time_range.end)
        for event in watch.events()
        # A named range (the optimizer's) spans what is idle within it.
        if event.device_type == wanted and not event.is_user_annotation
    ]
    return {"model": size.name, "idle": idle_share(busy), "steps": WATCHED, "intervals": len(busy)}
