"""One process with the shares of several, so that ``verify`` can hold it against those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.data import (
    _auto_add_worker_init_fn,
    _set_sampler_epoch,
    has_iterable_dataset,
)
from lightning.pytorch.trainer.connectors.data_connector import (
    _get_distributed_sampler,
    _parse_num_batches,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler

from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.errors import Unsupported

T = TypeVar("T")


class Shares:
    """The batches that ``mine`` of ``count`` processes would have, one of each in turn.

    Each share has its own stream of random numbers, as on a process of its own: all begin alike.
    """

    def __init__(self, mine: Sequence[int], count: int, device: torch.device) -> None:
        self.mine = tuple(mine)
        self.count = count
        self._device = device
        self._streams: dict[int, Mapping[str, Any]] = {}
        self._turn: int | None = None

    def turn(self, share: int) -> None:
        """Puts the random numbers of ``share`` in force."""
        if share == self._turn:
            return
        now = rng_state(self._device)
        if self._turn is None:
            self._streams = dict.fromkeys(self.mine, now)
        else:
            self._streams[self._turn] = now
        set_rng_state(self._streams[share], self._device)
        self._turn = share

    def of_each(self, make: Callable[[int], T]) -> list[T]:
        """``make(i)`` for the ``i``-th share, under its random numbers."""
        here, made = self._turn, []
        before = rng_state(self._device)
        for index, share in enumerate(self.mine):
            if here is None:  # none has had a turn: what each draws is the same
                set_rng_state(before, self._device)
            else:
                self.turn(share)
            made.append(make(index))
        if here is not None:
            self.turn(here)
        return made

    def put_into(self, trainer: Any) -> None:
        """Has ``trainer`` train on these shares.

        Raises:
            Unsupported: later, of a loader that says itself what each process reads.
        """
        connector = trainer._data_connector
        prepare, limit = connector._prepare_dataloader, trainer.limit_train_batches
        trainer.limit_train_batches = 1.0  # what it limits is a process's share

        def prepare_share(loader: Any, shuffle: bool, mode: RunningStage) -> Any:
            if mode != RunningStage.TRAINING:
                return prepare(loader, shuffle=shuffle, mode=mode)
            return Turns(self, self._loaders(loader, trainer), limit)

        connector._prepare_dataloader = prepare_share

    def _loaders(self, loader: Any, trainer: Any) -> list[DataLoader[Any]]:
        if (
            not isinstance(loader, DataLoader)
            or has_iterable_dataset(loader)
            or isinstance(loader.sampler, DistributedSampler)
            or not trainer._accelerator_connector.use_distributed_sampler
        ):
            raise Unsupported(
                "the batches of several processes cannot be taken in turn by one: the training "
                "loader says itself what each process reads, without Lightning's sampler",
                fix="compare strategies that run on as many processes as one another; "
                "single is one",
            )
        made = []
        for share in self.mine:
            sampler = _get_distributed_sampler(
                loader,
                shuffle=True,  # as Lightning has it where it puts its sampler in
                mode=RunningStage.TRAINING,
                overfit_batches=trainer.overfit_batches,
                num_replicas=self.count,
                rank=share,
            )
            made.append(_update_dataloader(loader, sampler, mode=RunningStage.TRAINING))
            _auto_add_worker_init_fn(made[-1], share)
        return made


class Turns:
    """Loaders of several processes as one loader; ``limit`` is Lightning's, of one of them."""

    def __init__(
        self, shares: Shares, loaders: Sequence[DataLoader[Any]], limit: int | float
    ) -> None:
        self._shares = shares
        self._loaders = loaders
        self._each = int(_parse_num_batches(RunningStage.TRAINING, len(loaders[0]), limit))

    @property
    def sampler(self) -> Turns:
        """Whom Lightning tells of an epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Another order for another epoch."""
        for loader in self._loaders:
            _set_sampler_epoch(loader, epoch)

    def __len__(self) -> int:
        return self._each * len(self._loaders)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._shares.of_each(lambda index: iter(self._loaders[index])))

    def _batches(self, iterators: Sequence[Iterator[Any]]) -> Iterator[Any]:
        for _ in range(self._each):
            for share, iterator in zip(self._shares.mine, iterators, strict=True):
                self._shares.turn(share)
                yield next(iterator)
