"""trainer.compile=auto on several processes: one answer, from the slowest, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torsh_trainer import DataSource, OptimizerSpec, Task
from torsh_trainer.comm import create
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.data.batch import MicroBatch
from torsh_trainer.environments.world import World
from torsh_trainer.strategies.base import BatchPlan, Job
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.training.compilation import measure


class Line(Task):
    optimizer = OptimizerSpec("SGD", lr=0.05)
    data = DataSource()

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


class Clock:
    """The times of one rank, in pairs of so many seconds."""

    def __init__(self, *seconds: float) -> None:
        self._times = iter(
            [sum(seconds[: i + more]) for i in range(len(seconds)) for more in (0, 1)]
        )

    def __call__(self) -> float:
        return next(self._times)


def read(comm: Communicator) -> MicroBatch:
    return MicroBatch((torch.ones(4, 4),), 4.0, None)


# first, three to warm up, ten to be timed: eager, then compiled
SECONDS = {
    "pays on both": ((2, 3, 10, 21, 1.5, 5), (2, 3, 10, 21, 1.5, 6)),
    "pays on rank 0 alone": ((2, 3, 10, 21, 1.5, 5), (2, 3, 9, 21, 1.5, 11)),
    "fails on rank 1": ((2, 3, 10, 21, 1.5, 5), (2, 3, 10)),
    "is too short on rank 0 alone": ((0.1, 0.1, 0.1, 21, 1.5, 5), (2, 3, 10, 21, 1.5, 6)),
}


def decide(world: World, name: str) -> dict[str, Any]:
    comm = create(world, CommOptions(backend="gloo"), torch.device("cpu"))
    try:
        task = Line()
        job = Job(task, task.build_model, BatchPlan(8, 4, 1, 2))
        clock = Clock(*SECONDS[name][world.rank])
        options = {"backend": "aot_eager"}
        return measure(job, read, comm, options=options, count=1000, clock=clock).as_dict()
    finally:
        comm.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, join=False) as pool:
        yield pool


@pytest.mark.parametrize(
    ("name", "compiled_s"),
    [
        ("pays on both", 0.6),
        ("pays on rank 0 alone", 1.1),
        ("fails on rank 1", None),
        ("is too short on rank 0 alone", 0.6),
    ],
)
def test_all_ranks_decide_as_the_slowest(
    name: str, compiled_s: float | None, ranks: RankPool
) -> None:
    first, second = ranks.run(decide, name)
    assert first == second
    assert first["compiled_s"] == (compiled_s and pytest.approx(compiled_s))
    assert first["compiles"] is (compiled_s == 0.6)
