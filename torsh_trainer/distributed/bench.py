"""What is measured of collectives, and what comes of it: sizes, formulas, records; without torch.

Names, sizes and formulas are those of nccl-tests (https://github.com/NVIDIA/nccl-tests,
doc/PERFORMANCE.md). ``bytes`` is the size S of the algorithm bandwidth S / t: for all_gather,
reduce_scatter, gather, scatter and all_to_all the whole, not one process's part. The bus bandwidth
is that times a factor of the collective, so that it can be compared with what the hardware can do,
whatever the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# For n processes. gather, scatter and send_recv, which PERFORMANCE.md does not name, have theirs in
# src/gather.cu, src/scatter.cu and src/sendrecv.cu.
BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}
COLLECTIVES = tuple(BUS_FACTORS)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
FLAT = "flat"
"""The backend's own all-reduce, beside the other routes to the same result."""


@dataclass(frozen=True)
class BenchPlan:
    """What is measured: ``sizes`` in bytes, and how often.

    A size is repeated ``iterations`` times after ``warmup``, or fewer times when that would take
    longer than ``seconds``. ``by_algorithm`` adds the other routes of all-reduce.
    """

    collectives: tuple[str, ...] = COLLECTIVES
    sizes: tuple[int, ...] = (1024,)
    dtype: str = "float32"
    iterations: int = 20
    warmup: int = 5
    seconds: float = 0.5
    by_algorithm: bool = False


@dataclass(frozen=True)
class BenchRecord:
    """One collective at one size: the time is the mean over repetitions and over processes.

    Bandwidths are in GB/s (10^9 bytes). ``wrong`` counts elements that were not as they had to be,
    on all processes. ``algorithm`` is empty but for all_reduce.
    """

    backend: str
    collective: str
    algorithm: str
    processes: int
    device: str
    dtype: str
    bytes: int
    iterations: int
    time_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int


def sizes_between(least: int, most: int, factor: int) -> tuple[int, ...]:
    """``least``, times ``factor`` again and again, up to ``most``."""
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)
