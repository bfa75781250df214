"""Loaders whose samples come in the trainer's order: which ids, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from torsh_trainer.data.sampler import BatchPartition, Orders
from torsh_trainer.data.seeding import Seeded
from torsh_trainer.errors import Unsupported

Place = Callable[[], tuple[int, int]]
"""The epoch, and how many of its batches lie behind."""


class Batches:
    """This process's part of each batch of an epoch: what a loader of torch's takes for its sampler
    of batches.

    ``orders`` are those of the dataset, of which an epoch has ``kept`` samples. ``cut`` says how
    they are taken apart: what lies between two ``cut.batch_size`` is one batch here. ``keyed``
    gives samples with their epoch. ``place`` says where an epoch begins, else it begins at its
    first batch, and is that of ``set_epoch``.
    """

    def __init__(
        self,
        orders: Orders,
        cut: BatchPartition,
        *,
        kept: int,
        keyed: bool,
        place: Place | None,
    ) -> None:
        self.cut = cut
        self.orders = orders
        self._kept = kept
        self._keyed = keyed
        self._place = place
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order is next, where nobody else says it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self._kept / self.cut.batch_size)

    def samples(self, first: int, last: int) -> int:
        """How many samples the batches from ``first`` up to ``last`` have on all processes."""
        batch = self.cut.batch_size
        return min(last * batch, self._kept) - first * batch

    def share(self, index: int) -> tuple[int, int]:
        """How many samples of batch ``index`` count here, and on all processes."""
        total, micro = self.samples(index, index + 1), self.cut.micro_batch_size
        return min(max(total - micro * self.cut.dp_rank, 0), micro), total

    def __iter__(self) -> Iterator[list[Any]]:
        epoch, first = (self._epoch, 0) if self._place is None else self._place()
        return self._from(epoch, first)  # where training is now, not when it asks for a batch

    def _from(self, epoch: int, first: int) -> Iterator[list[Any]]:
        order, batch = self.orders.of_epoch(epoch), self.cut.batch_size
        for index in range(first, len(self)):
            ids = order.ids(index * batch, min((index + 1) * batch, self._kept))
            (share,) = self.cut.shares(ids)
            yield [(epoch, sample) for sample in share.ids] if self._keyed else share.ids


class SeededDataset(Seeded):
    """A user's dataset, with random numbers for a sample from (seed, epoch, sample).

    Everything else about it is the dataset's own.
    """

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # asked for while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


# -- what cannot be brought into order ------------------------------------------------------------


def check_loader(loader: Any, name: str) -> None:
    """Refuses a loader with an order of its own.

    Raises:
        Unsupported: names the loader, and what gives it that order.
    """
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise order_error(f"a {kind} in {name}", f"give a torch.utils.data.DataLoader, {OR}")
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler
    if isinstance(dataset, IterableDataset):
        raise order_error(
            f"the IterableDataset {type(dataset).__name__} in {name}",
            f"give a dataset with __len__ and __getitem__, {OR}",
        )
    if hasattr(loader, "state_dict"):
        raise order_error(
            f"the {kind} in {name}, which keeps its place itself",
            "give a torch.utils.data.DataLoader: the run knows the place",
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise order_error(
            f"{name} with batch_size=None"
            if loader.batch_sampler is None
            else f"the batch sampler {type(loader.batch_sampler).__name__} in {name}",
            f"give the loader batch_size and shuffle, {OR}",
        )
    plain = type(sampler) in (RandomSampler, SequentialSampler) or weights_of(loader) is not None
    if not plain or getattr(sampler, "_num_samples", None) is not None:
        raise order_error(
            f"the sampler {type(sampler).__name__} in {name}",
            "give the loader shuffle=True or False, or a WeightedRandomSampler with replacement "
            f"and one draw for each sample, {OR}",
        )
    if type(sampler) is RandomSampler and sampler.replacement:
        raise order_error(f"a RandomSampler with replacement in {name}", f"leave that out, {OR}")
    if type(sampler) is not SequentialSampler and sampler.generator is not None:
        raise order_error(
            f"a generator for the order of {name}",
            "leave it out of the loader: trainer.seed says the order",
        )


OR = "or set task.order=lightning"


def weights_of(loader: DataLoader[Any]) -> Tensor | None:
    """Of a WeightedRandomSampler that draws as ``data.weighted`` does; None of any other."""
    sampler: Any = loader.sampler
    if type(sampler) is not WeightedRandomSampler or not sampler.replacement:
        return None
    weights: Tensor = sampler.weights
    size = len(cast(Sized, loader.dataset))
    return weights if sampler.num_samples == len(weights) == size else None


def order_error(what: str, use: str) -> Unsupported:
    """The error for something that has no meaning in this order."""
    return Unsupported(f"task.order=ours cannot honour {what}", fix=use)


def indivisible(name: str, batch: int, ranks: int) -> Unsupported:
    """The error for a batch that leaves processes unequal parts."""
    below = batch // ranks * ranks
    near = f"{below} or {below + ranks}" if below else str(ranks)
    return Unsupported(
        f"under task.order=ours the batch_size={batch} of {name} is that of all processes, and "
        f"does not divide over {ranks}",
        fix=f"batch_size={near} would",
    )
