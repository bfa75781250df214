"""One process of an all-reduce between hosts over gloo: small and large messages, timed."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

SMALL, LARGE, LARGEST = 4, 2**18, 2**22
"""Elements of float32: 16 bytes, which any packet holds, 1 MiB, which takes hundreds, 16 MiB."""

_REPEATS = 20
_QUICK_S = 0.02


def try_all_reduce(
    *, rank: int, size: int, address: str, port: int, seconds: float, timeout_s: float
) -> dict[str, Any]:
    """Meets at ``address:port``, and reduces small and large tensors for ``seconds``.

    Returns ``small_s``, the seconds of a small all-reduce, and ``bandwidth``, bytes a second as
    nccl-tests counts them on the bus, 2 (n - 1) / n times the message; or ``stage`` (``meet``,
    ``small``, ``large``) and ``error`` where it failed.
    """
    stage, told = "meet", {}
    try:
        limit = timedelta(seconds=timeout_s)
        store = TCPStore(
            address, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=True
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        stage = "small"
        value = torch.ones(SMALL)
        dist.all_reduce(value)
        if value[0].item() != size:
            return {"stage": stage, "error": f"the sum of {size} ones is {value[0].item():g}"}
        started = time.monotonic()
        for _ in range(_REPEATS):
            dist.all_reduce(value)
            value.fill_(1)
        told["small_s"] = (time.monotonic() - started) / _REPEATS
        stage = "large"
        told["bandwidth"] = _measure_bandwidth(size, seconds)
        dist.barrier()
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        said = re.sub(r"^\[[^]]*\]\s*", "", first).partition(". ")[0]
        return {"stage": stage, "error": said, **told}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return told


def _measure_bandwidth(size: int, seconds: float) -> float:
    """Bytes a second on the bus; all processes do what rank 0's clock allows."""
    value = torch.ones(LARGE)
    started = time.monotonic()
    dist.all_reduce(value)
    if _is_so_on_rank_zero(time.monotonic() - started < _QUICK_S):
        value = torch.ones(LARGEST)
        dist.all_reduce(value)
    rounds, started = 0, time.monotonic()
    while True:
        value.fill_(1)
        dist.all_reduce(value)
        rounds += 1
        if not _is_so_on_rank_zero(time.monotonic() - started < seconds):
            break
    took = time.monotonic() - started
    return rounds * value.numel() * 4 * 2 * (size - 1) / size / took


def _is_so_on_rank_zero(answer: bool) -> bool:
    told = torch.tensor([float(answer)])
    dist.broadcast(told, 0)
    return bool(told.item())
