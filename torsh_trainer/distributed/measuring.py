"""How long collectives take: what every process of a measurement runs; see ``comm.bench``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.distributed import algorithms, checking
from torsh_trainer.distributed.bench import BUS_FACTORS, FLAT, BenchPlan, BenchRecord
from torsh_trainer.distributed.process_group import ProcessGroup
from torsh_trainer.errors import ResourceError, TorshError

_PERIOD = 7
"""Test values are 0 to 6: sums over 36 processes are exact even in bfloat16."""


class CollectiveTrial(NamedTuple):
    """A collective with its buffers: ``run`` does it, ``wrong`` counts what is not as expected."""

    run: Callable[[], Any]
    wrong: Callable[[], int]


def sweep(group: ProcessGroup, plan: BenchPlan) -> list[dict[str, Any]]:
    """Every collective of ``plan`` at every size, as plain records; collective over ``group``."""
    records: list[dict[str, Any]] = []
    for name in plan.collectives:
        several = name == "all_reduce" and plan.by_algorithm
        for algorithm in algorithms.routes_for(group) if several else [_own(name)]:
            sized = (measure(group, plan, name, algorithm, size) for size in plan.sizes)
            records += [asdict(record) for record in sized]
    return records


def measure(
    group: ProcessGroup, plan: BenchPlan, collective: str, algorithm: str, size: int
) -> BenchRecord:
    """One collective at one size of about ``size`` bytes."""
    n, dtype = group.world_size(), getattr(torch, plan.dtype)
    part = max(1, size // dtype.itemsize // n)
    trial = _make_trial(group, collective, dtype, part, algorithm)
    try:
        wrong = _total(group, float(_verify_trial(trial)))
        time_us, iterations = _time_runs(group, plan, trial.run)
    except (TorshError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise checking.explain_failure(group, collective, error) from error
    nbytes = part * n * dtype.itemsize
    algbw = nbytes / time_us / 1e3
    return BenchRecord(
        backend=group.backend,
        collective=collective,
        algorithm=algorithm,
        processes=n,
        device=group.device.type,
        dtype=plan.dtype,
        bytes=nbytes,
        iterations=iterations,
        time_us=time_us,
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * BUS_FACTORS[collective](n),
        wrong=round(wrong),
    )


def _make_trial(
    group: ProcessGroup, collective: str, dtype: torch.dtype, part: int, algorithm: str
) -> CollectiveTrial:
    try:
        return _TRIALS[collective](group, dtype, part, algorithm)
    except RuntimeError as error:  # on a CPU torch has no kind of its own for it
        raise ResourceError(
            f"rank {group.rank()} has no memory for {collective} of "
            f"{part * group.world_size() * dtype.itemsize} bytes: {str(error).splitlines()[0]}",
            fix="give a smaller --max",
        ) from error


def _own(collective: str) -> str:
    return FLAT if collective == "all_reduce" else ""


def _verify_trial(trial: CollectiveTrial) -> int:
    trial.run()
    return trial.wrong()


def _time_runs(group: ProcessGroup, plan: BenchPlan, run: Callable[[], Any]) -> tuple[float, int]:
    """(mean microseconds over repetitions and processes, repetitions)."""
    first_us = _total(group, _loop(group, run, 1)) / group.world_size()
    affordable = max(1, int(plan.seconds * 1e6 / max(first_us, 0.1)))
    _loop(group, run, min(plan.warmup, affordable))
    iterations = min(plan.iterations, affordable)
    return _total(group, _loop(group, run, iterations)) / group.world_size(), iterations


def _loop(group: ProcessGroup, run: Callable[[], Any], count: int) -> float:
    """Mean microseconds of ``run`` on this process."""
    if not count:
        return 0.0
    dist.barrier(group.process_group)
    _settle(group)
    begin = time.perf_counter()
    for _ in range(count):
        run()
    _settle(group)
    return (time.perf_counter() - begin) / count * 1e6


def _settle(group: ProcessGroup) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def _total(group: ProcessGroup, value: float) -> float:
    """The sum over processes, the same on each of them."""
    tensor = torch.tensor([value], dtype=torch.float64, device=group.device)
    dist.all_reduce(tensor, group=group.process_group)
    return tensor.item()


# -- what is run -----------------------------------------------------------------------------------
# ``part`` is the number of elements of one member's part; the whole holds one part a member. Each
# builder takes (group, dtype, part, algorithm).


def _all_reduce(
    group: ProcessGroup, dtype: torch.dtype, part: int, algorithm: str
) -> CollectiveTrial:
    n, rank = group.world_size(), group.rank()
    tensor = _tile(rank, part * n, dtype, group.device)
    route = algorithms.ALGORITHMS[algorithm]
    pg = group.process_group

    def run() -> None:
        if algorithm == FLAT:
            dist.all_reduce(tensor, group=pg)
        else:
            route(tensor, "sum", group)

    def wrong() -> int:
        expected = sum(_row(other, dtype, group.device) for other in range(n))
        count = _differ(tensor, _repeat(expected, part * n))
        tensor.zero_()  # sums of sums would overflow
        return count

    return CollectiveTrial(run, wrong)


def _reduce(group: ProcessGroup, dtype: torch.dtype, part: int, algorithm: str) -> CollectiveTrial:
    n, rank = group.world_size(), group.rank()
    tensor = _tile(rank, part * n, dtype, group.device)
    pg, root = group.process_group, group.ranks[0]

    def wrong() -> int:
        if rank != 0:
            return 0  # c10d leaves open what those who only give are left with
        expected = sum(_row(other, dtype, group.device) for other in range(n))
        count = _differ(tensor, _repeat(expected, part * n))
        tensor.zero_()
        return count

    return CollectiveTrial(lambda: dist.reduce(tensor, root, group=pg), wrong)


def _broadcast(
    group: ProcessGroup, dtype: torch.dtype, part: int, algorithm: str
) -> CollectiveTrial:
    n, pg, root = group.world_size(), group.process_group, group.ranks[0]
    tensor = _tile(group.rank(), part * n, dtype, group.device)
    return CollectiveTrial(
        lambda: dist.broadcast(tensor, root, group=pg),
        lambda: _differ(tensor, _tile(0, part * n, dtype, group.device)),
    )


def _reduce_scatter(
    group: ProcessGroup, dtype: torch.dtype, part: int, algorithm: str
) -> CollectiveTrial:
    n, rank = group.world_size(), group.rank()
    whole = _tile(rank, part * n, dtype, group.device)
    mine = torch.zeros(part, dtype=dtype, device=group.device)

    def wrong() -> int:
        expected = sum(_row(other, dtype, group.device) for other in range(n))
        return _differ(mine, _repeat(expected, part * n)[rank * part : (rank + 1) * part])

    pg = group.process_group
    return CollectiveTrial(lambda: dist.reduce_scatter_single(mine, whole, group=pg), wrong)


def _all_gather(
    group: ProcessGroup, dtype: torch.dtype, part: int, algorithm: str
) -> CollectiveTrial:
    n = group.world_size()
    mine = _tile(group.rank(), part, dtype, group.device)
    whole = torch.zeros(part * n, dtype=dtype, device=group.device)
    pg = group.process_group
    return CollectiveTrial(
        lambda: dist.all_gather_single(whole, mine, group=pg),
        lambda: _differ(whole, _join_tiles(group, dtype, part)),
    )


def _gather(group: ProcessGroup, dtype: torch.dtype, part: int, algorithm: str) -> CollectiveTrial:
    n, rank = group.world_size(), group.rank()
    mine = _tile(rank, part, dtype, group.device)
    whole = torch.zeros(part * n, dtype=dtype, device=group.device)
    room = list(whole.chunk(n)) if rank == 0 else None
    pg, root = group.process_group, group.ranks[0]
    return CollectiveTrial(
        lambda: dist.gather(mine, room, dst=root, group=pg),
        lambda: _differ(whole, _join_tiles(group, dtype, part)) if rank == 0 else 0,
    )


def _scatter(group: ProcessGroup, dtype: torch.dtype, part: int, algorithm: str) -> CollectiveTrial:
    n, rank = group.world_size(), group.rank()
    mine = torch.zeros(part, dtype=dtype, device=group.device)
    given = list(_join_tiles(group, dtype, part).chunk(n)) if rank == 0 else None
    pg, root = group.process_group, group.ranks[0]
    return CollectiveTrial(
        lambda: dist.scatter(mine, given, src=root, group=pg),
        lambda: _differ(mine, _tile(rank, part, dtype, group.device)),
    )


def _all_to_all(
    group: ProcessGroup, dtype: torch.dtype, part: int, algorithm: str
) -> CollectiveTrial:
    n, rank = group.world_size(), group.rank()
    given = torch.cat([_tile(rank + to, part, dtype, group.device) for to in range(n)])
    taken = torch.zeros_like(given)

    def wrong() -> int:
        parts = [_tile(source + rank, part, dtype, group.device) for source in range(n)]
        return _differ(taken, torch.cat(parts))

    pg = group.process_group
    return CollectiveTrial(lambda: dist.all_to_all_single(taken, given, group=pg), wrong)


def _send_recv(
    group: ProcessGroup, dtype: torch.dtype, part: int, algorithm: str
) -> CollectiveTrial:
    n, rank = group.world_size(), group.rank()
    given = _tile(rank, part * n, dtype, group.device)
    taken = torch.zeros_like(given)
    to, source = group.ranks[(rank + 1) % n], group.ranks[(rank - 1) % n]

    def run() -> None:
        if n > 1:
            algorithms.exchange(group, given, to, taken, source)

    before = (rank - 1) % n
    return CollectiveTrial(
        run,
        lambda: _differ(taken, _tile(before, part * n, dtype, group.device)) if n > 1 else 0,
    )


_TRIALS: dict[str, Callable[[ProcessGroup, torch.dtype, int, str], CollectiveTrial]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


def _row(rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The period of a rank's test values."""
    return ((torch.arange(_PERIOD) + rank) % _PERIOD).to(device=device, dtype=dtype)


def _repeat(row: Tensor | int, count: int) -> Tensor:
    assert isinstance(row, Tensor)
    return row.repeat(-(-count // _PERIOD))[:count]


def _tile(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _repeat(_row(rank, dtype, device), count).clone()


def _join_tiles(group: ProcessGroup, dtype: torch.dtype, part: int) -> Tensor:
    """The tiles of all members one after another."""
    return torch.cat([_tile(r, part, dtype, group.device) for r in range(group.world_size())])


def _differ(tensor: Tensor, expected: Tensor) -> int:
    return int((tensor != expected).sum())
