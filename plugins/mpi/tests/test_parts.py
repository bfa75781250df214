"""Tensors are reduced part by part in memory that ranks share, to the same bits on every rank."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torsh_mpi import parts as module
from torsh_mpi.agreement import FIRST
from torsh_mpi.shared import MIN_COUNT

from torsh_trainer.testing.ranks import OPTIONS, RankPool, shared_pool

MPI = replace(OPTIONS, backend="mpi")
COUNTS = [MIN_COUNT, 7, 3 * MIN_COUNT + 1, 1]


def values(rank: int, step: int) -> list[torch.Tensor]:
    """Different on every rank; sums of these floats depend on their order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(count, generator=generator) for count in COUNTS]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_who_is_late_or_puts_them_in_another_order_changes_nothing(size, twice, op):
    def case(comm):
        rank, size = comm.world.rank, comm.world.size
        limit = module.TWICE_BYTES
        module.TWICE_BYTES = limit if twice else 0
        parts = comm.shared_memory.parts(COUNTS, torch.float32, op=op)
        module.TWICE_BYTES = limit
        found = []
        for step in range(6):
            late = rank == step % size
            own = values(rank, step)
            if late:  # all others have put everything
                comm.process_group._channel.comm.Barrier()
            for number in reversed(range(len(COUNTS))) if late else range(len(COUNTS)):
                parts.put(number, own[number])
            if not late:
                comm.process_group._channel.comm.Barrier()
            parts.wait()
            of_ranks = zip(*(values(r, step) for r in range(size)), strict=True)
            sums = [reduce(torch.add, each) for each in of_ranks]
            expected = sums if op == "sum" else [each / size for each in sums]
            found.append(list(map(torch.equal, own, expected)))
        return found

    assert shared_pool(size, options=MPI).run(case) == [[[True] * len(COUNTS)] * 6] * size


def test_there_are_none_of_what_is_small_or_unsigned_or_elsewhere():
    def case(comm):
        memory = comm.shared_memory
        few = memory.parts([MIN_COUNT - 1], torch.float32)
        unsigned = memory.parts([MIN_COUNT], torch.uint64)
        return few is None, unsigned is None, memory.parts([MIN_COUNT], torch.float32) is None

    assert shared_pool(2, options=MPI).run(case) == [(True, True, False)] * 2
    assert shared_pool(2).run(lambda comm: comm.shared_memory is None) == [True] * 2


def test_who_puts_parts_while_another_reduces_is_told():
    def case(comm):
        parts = comm.shared_memory.parts([2 * MIN_COUNT], torch.float32)
        for _ in range(FIRST):
            dist.all_reduce(torch.ones(1))
        try:
            if comm.world.rank:
                parts.put(0, torch.ones(2 * MIN_COUNT))
                parts.wait()
            else:
                dist.all_reduce(torch.ones(2 * MIN_COUNT))
        except RuntimeError as error:
            return str(error)
        return ""

    with RankPool(2, options=MPI) as pool:
        for words in pool.run(case):
            assert f"rank 0: all_reduce of {2 * MIN_COUNT} float32 sum" in words
            assert f"rank 1: the sum of 1 parts of {2 * MIN_COUNT} torch.float32" in words


def test_a_part_that_comes_twice_is_refused():
    def case(comm):
        parts = comm.shared_memory.parts([MIN_COUNT, MIN_COUNT], torch.float32)
        parts.put(1, torch.ones(MIN_COUNT))
        try:
            parts.put(1, torch.ones(MIN_COUNT))
        except ValueError as error:
            return str(error)
        return ""

    for words in shared_pool(2, options=MPI).run(case):
        assert "a gradient came twice" in words
        assert "strategy.overlap=false" in words
