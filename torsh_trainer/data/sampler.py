"""The global order of samples: a function of (seed, epoch) alone, cut by position.

World size, micro-batch size and accumulation change who sees a sample, never when it comes. The
position is one integer, the samples consumed so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torsh_trainer.data.batch import Place, Samples

_MASK = (1 << 64) - 1
_KEY = _MASK >> 1


def mix(*words: int) -> int:
    """A well-spread 63-bit key from integers.

    The finalizer of splitmix64 (Steele, Lea and Flood 2014) after each word. torch's CPU generator
    looks at the lower 32 bits of a seed alone, so near-equal words must not give near-equal keys.
    """
    key = 0
    for word in words:
        key = (key + word + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key >> 1


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
    """Sample ids in the order of an epoch, length ``size``.

    ``weights`` (shape (size,)) draws with replacement in proportion to them.
    """
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    if weights is not None:
        order = torch.multinomial(weights.double(), size, replacement=True, generator=generator)
    elif shuffle:
        order = torch.randperm(size, generator=generator)
    else:
        return list(range(size))
    ids: list[int] = order.tolist()
    return ids


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
class Cut:
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

    def places(self, shares: Sequence[Share], samples: int, key: int) -> list[Place]:
        """Which ones this rank's micro-batches are, in a step of ``samples`` samples.

        ``key`` is that of the step's random numbers.
        """
        micro, of = self.micro_batch_size, -(-samples // self.micro_batch_size)
        places = []
        for i, (ids, counts) in enumerate(shares):
            number = i * self.dp_size + self.dp_rank
            first = number * micro if counts else 0
            places.append(Place(number, of, Samples(first, len(ids), key)))
        return places


@dataclass(frozen=True)
class GlobalSampler:
    """Plans of the steps from a position on, without end.

    ``size`` is the number of training samples; with ``drop_last`` an epoch ends at its last whole
    global batch.
    """

    size: int
    cut: Cut
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    weights: Tensor | None = None

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
            order = epoch_order(
                self.size,
                seed=self.seed,
                epoch=epoch,
                shuffle=self.shuffle,
                weights=self.weights,
            )
            while position < size:
                ids = order[position : min(position + batch, size)]
                position += len(ids)
                yield StepPlan(epoch, self.cut.shares(ids), len(ids), position >= size)
            epoch, position = epoch + 1, 0
