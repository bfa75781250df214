"""all-reduce through the mpi backend, beside mpi4py called directly and beside gloo.

``python all_reduce.py [processes]``. They take turns in blocks within one run; printed are medians
of the blocks, in microseconds, and what the backend adds to mpi4py. ``in the room`` is a tensor in
memory that all members reach (``Communicator.zeros``), as the buckets of strategy=mpi are.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from mpi4py import MPI
from torsh_mpi.launcher import Mpi

from torsh_trainer.comm import create
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.environments.world import World
from torsh_trainer.launchers.base import LaunchContext

SIZES = [8, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 100 << 20]
BLOCKS = 7
BLOCK_S = 0.04


def main() -> None:
    """Starts the ranks."""
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    launcher = Mpi(num_processes=processes)
    launcher.launch(measure, context=LaunchContext(env=dict(os.environ)))


def measure(world: World) -> None:
    """What every rank runs."""
    comm = create(world, CommOptions(backend="mpi"), torch.device("cpu"))
    raw = dist.group.WORLD._comm  # the same communicator, without anything around it
    gloo = dist.new_group(backend="gloo")
    if world.is_rank_zero:
        print(
            f"{'bytes':>12} {'mpi4py':>10} {'pg.allreduce':>13} {'dist.all_reduce':>16}"
            f" {'in the room':>12} {'gloo':>10} {'added':>8} {'ratio':>7}"
        )
    for size in SIZES:
        tensor = torch.ones(size // 4)
        # No other has so many elements.
        inside = comm.shared_memory.zeros(size // 4 + 1, torch.float32)
        memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        options = dist.AllreduceOptions()
        options.asyncOp = False

        def direct(memory=memory, tensor=tensor) -> None:
            raw.Allreduce(MPI.IN_PLACE, [memory, tensor.numel(), MPI.FLOAT])

        def group(tensor=tensor, options=options) -> None:
            dist.group.WORLD.allreduce([tensor], options)

        ways = {
            "mpi4py": direct,
            "group": group,
            "dist": lambda tensor=tensor: dist.all_reduce(tensor),
            "room": lambda inside=inside: dist.all_reduce(inside),
            "gloo": lambda tensor=tensor: dist.all_reduce(tensor, group=gloo),
        }
        found = {name: [] for name in ways}
        counts = {name: repeats(raw, way) for name, way in ways.items()}
        for _ in range(BLOCKS):
            for name, way in ways.items():
                found[name].append(time_calls(raw, way, counts[name]))
        if world.is_rank_zero:
            us = {name: statistics.median(times) * 1e6 for name, times in found.items()}
            print(
                f"{size:>12} {us['mpi4py']:>10.2f} {us['group']:>13.2f} {us['dist']:>16.2f} "
                f"{us['room']:>12.2f} {us['gloo']:>10.2f} {us['dist'] - us['mpi4py']:>8.2f} "
                f"{us['dist'] / us['mpi4py']:>7.3f}",
                flush=True,
            )
    comm.close()


def time_calls(raw: MPI.Intracomm, way: Callable[[], None], count: int) -> float:
    """Seconds a call, all ranks starting together."""
    raw.Barrier()
    began_s = time.perf_counter()
    for _ in range(count):
        way()
    return (time.perf_counter() - began_s) / count


def repeats(raw: MPI.Intracomm, way: Callable[[], None]) -> int:
    """Calls that fill a block; the same on every rank."""
    for _ in range(3):
        way()
    return raw.bcast(max(2, min(5000, int(BLOCK_S / time_calls(raw, way, 3)))))


if __name__ == "__main__":
    main()
