"""The loader that DeepSpeed makes of ``training_data``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported

_WORKERS = 2
"""Worker processes of a loader, as in DeepSpeed: what a dataset draws depends on them."""


class EngineLoader:
    """This process's share of a dataset, the order drawn from seed 0.

    As in DeepSpeed every epoch has the same order, until ``data_sampler.set_epoch`` is called.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        comm: Communicator,
        *,
        shuffles: bool = True,
        drops_last: bool = False,
        pin_memory: bool = True,
        sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        workers: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise Unsupported(
                "training_data that is an IterableDataset", fix="make a DataLoader of it yourself"
            )
        if sampler is None:
            sampler = DistributedSampler(dataset, comm.size, comm.rank, shuffle=shuffles)
        self.dataset, self.data_sampler, self.batch_size = dataset, sampler, batch_size
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drops_last,
            num_workers=_WORKERS if workers is None else workers,
            pin_memory=pin_memory and comm.device.type == "cuda",
        )
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> EngineLoader:
        self._batches = iter(self._loader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)
