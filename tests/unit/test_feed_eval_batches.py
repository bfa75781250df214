"""trainer.eval_batches takes the same samples however processes divide a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from torsh_trainer import DataSource, Loading, Task
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.feed import eval_batches
from torsh_trainer.data.sampler import BatchPartition

SIZE, BATCH = 50, 12


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Counted(IterableDataset[Tensor]):
    epochs: list[int]

    def __init__(self) -> None:
        self.epochs = []

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(SIZE))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Evaluated(Task):
    def __init__(self, data: Any) -> None:
        self.data = DataSource()
        self.data.eval = data

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.sum()


def samples_of(data: Any, processes: int, micro: int, limit: int | None, **knobs: Any) -> list[int]:
    """What all processes together are given to evaluate, in order."""
    found: list[int] = []
    for rank in range(processes):
        cut = BatchPartition(BATCH, micro, processes, rank)
        task, loading = Evaluated(data), Loading(batch_size=BATCH, **knobs)
        batches = eval_batches(task, "eval", loading, cut, LocalCommunicator(), limit=limit)
        found += [int(i) for batch, counts in batches if counts for i in batch]
    return sorted(found)


@pytest.mark.parametrize("make", [Numbers, Counted])
@pytest.mark.parametrize(("processes", "micro"), [(1, 12), (1, 4), (2, 3), (2, 6), (4, 3), (4, 1)])
@pytest.mark.parametrize("knobs", [{}, {"eval_batch_size": 5}], ids=["", "of 5"])
def test_it_is_so_many_global_batches_on_any_number_of_processes(make, processes, micro, knobs):
    data = make()
    assert samples_of(data, processes, micro, 2, **knobs) == list(range(2 * BATCH))
    assert samples_of(data, processes, micro, 9, **knobs) == list(range(SIZE))  # all there is
    assert samples_of(data, processes, micro, None, **knobs) == list(range(SIZE))
    assert make is Numbers or set(data.epochs) == {0}
