"""The global order of samples: a function of (seed, epoch) alone, cut by position.

Up to ``LISTED`` samples an order is torch's, as a list; beyond, it is computed from the position
(``by_position``), in memory that does not grow with the samples. World size, micro-batch size and
accumulation change who sees a sample, never when it comes. The position is one integer, the samples
consumed so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from torsh_trainer.data.batch import MicroBatchPlace, Samples
from torsh_trainer.data.by_position import ROUNDS, Computed, draws, permutation
from torsh_trainer.data.sums import Sums, cumulative_sums

LISTED = 1 << 20
"""Samples up to which an order is a list, unless a checkpoint says otherwise."""

MOST_LISTED = 1 << 24
"""As many as ``torch.multinomial`` draws from."""

_MASK = (1 << 64) - 1
_KEY = _MASK >> 1


def mix(*words: int) -> int:
    """A well-spread 63-bit key from integers.

    The finalizer of splitmix64 (Steele, Lea and Flood 2014) after each word. torch's CPU generator
    looks at the lower 32 bits of a seed alone, so near-equal words must not give near-equal keys.
    """
    key = 0
    for word in words:
        key = _stir(key, word)
    return key >> 1


def _stir(key: int, word: int) -> int:
    key = (key + word + 0x9E3779B97F4A7C15) & _MASK
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
    return key ^ (key >> 31)


def sample_keys(seed: int, epoch: int, ids: Sequence[int]) -> list[int]:
    """``mix(seed, epoch, id)`` for each of ``ids``."""
    keys = np.array(ids, dtype=np.uint64)
    keys += np.uint64((_stir(_stir(0, seed), epoch) + 0x9E3779B97F4A7C15) & _MASK)
    keys ^= keys >> _SHIFTS[0]  # _stirred, of all at once: it is most of what a key costs
    keys *= _FACTORS[0]
    keys ^= keys >> _SHIFTS[1]
    keys *= _FACTORS[1]
    keys ^= keys >> _SHIFTS[2]
    keys >>= _SHIFTS[3]
    found: list[int] = keys.tolist()
    return found


_SHIFTS = tuple(map(np.uint64, (30, 27, 31, 1)))
_FACTORS = tuple(map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))


class ForwardKeys:
    """Keys for the random numbers of forwards: functions of (seed, step, global micro-batch).

    The step is mixed once, by the finalizer; micro-batches of a step lie an odd constant apart.
    """

    def __init__(self, seed: int) -> None:
        self._seed = mix(seed, 0x666F7277617264)  # another stream than that of the sample order

    def of_step(self, step: int) -> int:
        """The key of micro-batch 0."""
        return mix(self._seed ^ step)

    @staticmethod
    def of_micro_batch(step_key: int, number: int) -> int:
        """The key of the micro-batch ``number``, counted over all ranks."""
        return (step_key + number * 0x9E3779B97F4A7C15) & _KEY


def epoch_order(
    size: int, *, seed: int, epoch: int, shuffle: bool, weights: Tensor | None = None
) -> list[int]:
    """Sample ids in the order of an epoch as a list has them, length ``size``.

    ``weights`` (shape (size,)) draws with replacement in proportion to them.
    """
    if weights is None and not shuffle:
        return list(range(size))
    return _draw_order(size, mix(seed, epoch), weights).tolist()


def _draw_order(size: int, key: int, weights: Tensor | None) -> Tensor:
    generator = torch.Generator().manual_seed(key)
    if weights is None:
        return torch.randperm(size, generator=generator)
    return torch.multinomial(weights.double(), size, replacement=True, generator=generator)


class SampleOrder(Protocol):
    """The sample ids of an epoch."""

    def ids(self, start: int, stop: int) -> list[int]:
        """Those at the positions from ``start`` up to ``stop``."""


class _AsTheyCome:
    def ids(self, start: int, stop: int) -> list[int]:
        return list(range(start, stop))


class _List:
    def __init__(self, ids: Tensor) -> None:
        self._ids = ids.numpy()

    def ids(self, start: int, stop: int) -> list[int]:
        found: list[int] = self._ids[start:stop].tolist()
        return found


class Orders:
    """The order of every epoch of ``size`` samples.

    ``weights`` (shape (size,)) draws with replacement in proportion to them; where an order is
    computed, so do their cumulative ``sums`` alone. ``listed`` says whether an order is a list;
    None decides by the size.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        shuffle: bool,
        weights: Tensor | None = None,
        sums: Sums | None = None,
        listed: bool | None = None,
    ) -> None:
        self._size = size
        self._seed = seed
        weighted = weights is not None or sums is not None
        self._draws = shuffle or weighted
        self._listed = sums is None and not is_computed(size, listed, weighted=weighted)
        self._weights, self._sums = weights, sums
        if weights is not None and not self._listed:
            self._weights, self._sums = None, cumulative_sums(weights)

    def of_epoch(self, epoch: int) -> SampleOrder:
        if not self._draws:
            return _AsTheyCome()
        key = mix(self._seed, epoch)
        if self._listed:
            return _List(_draw_order(self._size, key, self._weights))
        if self._sums is not None:
            return Computed(draws(self._sums, key), self._size)
        keys = [mix(key, number) for number in range(ROUNDS)]
        return Computed(permutation(self._size, keys), self._size)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint has to say, for ``is_listed``; {} of a list."""
        return {} if self._listed or not self._draws else {"order": "computed"}


def is_listed(state: Mapping[str, Any] | None, consumed: int) -> bool | None:
    """How a run goes on after ``consumed`` samples, from a checkpoint that holds ``state``.

    Every order was a list once, and of those a checkpoint says nothing. None: nothing says it.
    """
    if state is None or not consumed:
        return None
    return state.get("order") != "computed"


def is_computed(size: int, listed: bool | None, *, weighted: bool) -> bool:
    """Whether an order of ``size`` samples is no list; ``listed`` as for ``Orders``."""
    most = MOST_LISTED if weighted else size
    return size > (LISTED if listed is None else most * listed)


class Share(NamedTuple):
    """One micro-batch of one rank: sample ids, and how many of them count.

    ``counts`` is ``len(ids)``, or 0 when this is a filler in the ragged tail.
    """

    ids: list[int]
    counts: int


class StepPlan(NamedTuple):
    """What this rank does in one step: its micro-batches, and the global number of samples."""

    epoch: int
    shares: list[Share]
    samples: int
    ends_epoch: bool


@dataclass(frozen=True)
class BatchPartition:
    """How a global batch is cut: global micro-batch ``g`` goes to rank ``g % dp_size``."""

    batch_size: int
    micro_batch_size: int
    dp_size: int
    dp_rank: int

    def shares(self, ids: list[int]) -> list[Share]:
        """This rank's micro-batches of a global batch; every rank gets as many.

        A rank for which no samples are left runs the first micro-batch again with weight 0: a
        forward that one rank skips would hang the others, and BatchNorm refuses a single sample.
        """
        micro, ranks = self.micro_batch_size, self.dp_size
        if ranks == 1 and len(ids) <= micro:
            return [Share(ids, len(ids))]
        rounds = -(-len(ids) // (micro * ranks))
        shares = []
        for i in range(rounds):
            start = (i * ranks + self.dp_rank) * micro
            part = ids[start : start + micro]
            shares.append(Share(part, len(part)) if part else Share(ids[:micro], 0))
        return shares

    def places(self, shares: Sequence[Share], samples: int, key: int) -> list[MicroBatchPlace]:
        """Which ones this rank's micro-batches are, in a step of ``samples`` samples.

        ``key`` is that of the step's random numbers.
        """
        micro, of = self.micro_batch_size, -(-samples // self.micro_batch_size)
        places = []
        for i, (ids, counts) in enumerate(shares):
            number = i * self.dp_size + self.dp_rank
            first = number * micro if counts else 0
            places.append(MicroBatchPlace(number, of, Samples(first, len(ids), key)))
        return places


@dataclass(frozen=True)
class GlobalSampler:
    """Plans of the steps from a position on, without end.

    ``size`` is the number of training samples; with ``drop_last`` an epoch ends at its last whole
    global batch. ``weights``, ``sums`` and ``listed`` are those of ``Orders``.
    """

    size: int
    cut: BatchPartition
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    weights: Tensor | None = None
    sums: Sums | None = None
    listed: bool | None = None

    @cached_property
    def orders(self) -> Orders:
        return Orders(
            self.size,
            seed=self.seed,
            shuffle=self.shuffle,
            weights=self.weights,
            sums=self.sums,
            listed=self.listed,
        )

    @property
    def epoch_size(self) -> int:
        """Samples of one epoch."""
        whole = self.size // self.cut.batch_size * self.cut.batch_size
        return whole if self.drop_last else self.size

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.epoch_size // self.cut.batch_size)

    def plans(self, consumed: int) -> Iterator[StepPlan]:
        """The steps that follow after ``consumed`` samples."""
        size, batch = self.epoch_size, self.cut.batch_size
        epoch, position = divmod(consumed, size)
        while True:
            order = self.orders.of_epoch(epoch)
            while position < size:
                ids = order.ids(position, min(position + batch, size))
                position += len(ids)
                yield StepPlan(epoch, self.cut.shares(ids), len(ids), position >= size)
            epoch, position = epoch + 1, 0
            del order  # a list goes before the next one is made
