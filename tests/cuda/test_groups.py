"""Collectives and groups by the names of torch.distributed: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from typing import Any

import torch

from torsh_trainer import distributed as tc
from torsh_trainer.comm.base import Communicator
from torsh_trainer.testing.ranks import OPTIONS, shared_pool


def exchange(comm: Communicator) -> dict[str, Any]:
    """What each collective gives to a rank that brings its number, counted from 1."""
    rank, size, device = comm.world.rank, comm.world.size, comm.device

    def mine() -> torch.Tensor:
        return torch.full((2,), float(rank + 1), device=device)

    def row() -> torch.Tensor:
        """One number for each member."""
        return torch.arange(size, device=device, dtype=torch.float32) + 10 * rank

    added, largest, first, part = mine(), mine(), mine(), torch.zeros(1, device=device)
    tc.all_reduce(added)
    tc.all_reduce(largest, op=tc.ReduceOp.MAX)
    tc.broadcast(first, src=0)
    tc.reduce_scatter_tensor(part, row())
    swapped = torch.zeros(size, device=device)
    tc.all_to_all_single(swapped, row())
    later = mine()
    work = tc.all_reduce(later, async_op=True)
    work.wait()
    # Everybody takes part in making a group, and only its members use it.
    alone = [tc.new_group([member]) for member in range(size)][rank]
    everybody = tc.new_group(list(range(size)))
    own, shared_sum = mine(), mine()
    tc.all_reduce(own, group=alone)
    tc.all_reduce(shared_sum, group=everybody)
    gathered = tc.all_gather(mine(), concat=True)
    tc.barrier()
    found = {
        "backend": tc.get_backend(),
        "sum": added,
        "max": largest,
        "of rank 0": first,
        "part": part,
        "swapped": swapped,
        "async": later,
        "alone": own,
        "everybody": shared_sum,
        "gathered": gathered,
    }
    for group in (alone, everybody):
        tc.destroy_process_group(group)
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def test_every_collective_gives_what_arithmetic_says_in_the_world_and_in_groups(
    device: str, ranks: int
) -> None:
    total = float(sum(range(1, ranks + 1)))
    for rank, found in enumerate(shared_pool(ranks, device, OPTIONS).run(exchange)):
        assert found == {
            "backend": "nccl" if device == "cuda" else "gloo",
            "sum": [total, total],
            "max": [float(ranks)] * 2,
            "of rank 0": [1.0, 1.0],
            "part": [float(sum(rank + 10 * other for other in range(ranks)))],
            "swapped": [float(rank + 10 * other) for other in range(ranks)],
            "async": [total, total],
            "alone": [float(rank + 1)] * 2,
            "everybody": [total, total],
            "gathered": [float(other + 1) for other in range(ranks) for _ in range(2)],
        }
