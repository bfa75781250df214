"""The sums that weighted samples are drawn by are one memory for the ranks of a host."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torsh_trainer import DataSource, Loading, Task
from torsh_trainer.comm.base import Communicator
from torsh_trainer.data import sums
from torsh_trainer.data.feed import TrainLoader
from torsh_trainer.data.sampler import BatchPartition, GlobalSampler
from torsh_trainer.data.sums import common_sums, cumulative_sums
from torsh_trainer.testing.ranks import shared_pool

RANKS = 3
SIZE = 10_000
COMPUTED = {"order": "computed"}


def weights(size: int = SIZE) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(4))


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Weighted(Task):
    class Source(DataSource):
        train = Numbers()

        def sample_weights(self) -> Tensor:
            return weights()

    data = Source()

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, outputs: Any, batch: Any) -> Any:
        raise AssertionError("nobody trains here")


def feed_of(comm: Communicator) -> TrainLoader:
    cut = BatchPartition(24, 8, comm.world.size, comm.world.rank)
    loading = Loading(batch_size=24, weighted=True)
    return TrainLoader(Weighted(), loading, cut, comm, seed=5, consumed=240, state=COMPUTED)


def drawn(comm: Communicator) -> list[list[int]]:
    steps = iter(feed_of(comm))
    found = [next(steps).micro_batches[0].batch.tolist() for _ in range(20)]
    steps.close()
    return found


def expected(rank: int) -> list[list[int]]:
    cut = BatchPartition(24, 8, RANKS, rank)
    plans = GlobalSampler(SIZE, cut, 5, weights=weights(), listed=False).plans(240)
    return [next(plans).shares[0].ids for _ in range(20)]


def places(marker: str = "torsh-weights") -> set[tuple[str, int]]:
    """Device and inode, and bytes, of each shared memory of sums that this process has mapped."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if marker in line:
            span, _, _, device, inode = line.split()[:5]
            start, end = (int(edge, 16) for edge in span.split("-"))
            found.add((f"{device} {inode}", end - start))
    return found


def held(comm: Communicator) -> tuple[set[tuple[str, int]], int]:
    """Where the sums lie, and how many tensors of weights are alive."""
    feed = feed_of(comm)
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) is Tensor and one.shape == (SIZE,)]
    found = places(), len(alive)
    feed.steps().close()
    return found


def files() -> set[str]:
    folders = Path("/dev/shm"), Path(tempfile.gettempdir())
    return {file.name for folder in folders for file in folder.iterdir()}


def test_ranks_draw_what_one_process_with_sums_of_its_own_draws() -> None:
    assert shared_pool(RANKS).run(drawn) == [expected(rank) for rank in range(RANKS)]


def test_ranks_of_a_host_have_one_memory_and_no_weights() -> None:
    answers = shared_pool(RANKS).run(held)
    (only,) = answers[0][0]
    assert all(found == {only} for found, _ in answers), "every rank has the same"
    assert only[1] - SIZE * 8 < 4096
    assert [alive for _, alive in answers] == [0] * RANKS


def test_the_memory_has_no_name_that_a_killed_job_would_leave() -> None:
    def make(comm: Communicator) -> tuple[set[str], set[str]]:
        before = files()
        common = common_sums(weights(), comm)
        comm.barrier()
        assert len(common) == SIZE
        return before, files()

    for before, after in shared_pool(RANKS).run(make):
        assert not {name for name in after - before if "torsh" in name}


@pytest.mark.parametrize("fault", ["no memory", "another process", "gone", "another host"])
def test_a_rank_that_does_not_reach_the_memory_has_sums_of_its_own(fault: str) -> None:
    def make(comm: Communicator) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            if fault == "no memory":

                def refuse(name: str) -> int:
                    raise OSError("none")

                patch.setattr(os, "memfd_create", refuse)
            elif fault == "another host":
                patch.setattr(sums, "_host", lambda: f"host {comm.world.rank}")
            elif comm.world.rank == 1:
                told = (os.getpid(), 0 if fault == "another process" else 9999, (0, 0, 0))
                own = sums._open_shared
                patch.setattr(sums, "_open_shared", lambda _: own(told))
            return bool(np.array_equal(common_sums(weights(), comm), cumulative_sums(weights())))

    assert shared_pool(RANKS).run(make) == [True] * RANKS
