"""What the feed hands to an engine."""

from __future__ import annotations

from typing import Any, NamedTuple


class Samples(NamedTuple):
    """Which samples of a global batch a micro-batch holds: ``size``, from the ``first`` on.

    ``key`` is that of the step's random numbers, the same for all of its samples.
    """

    first: int
    size: int
    key: int


class MicroBatchPlace(NamedTuple):
    """Which micro-batch of a step this is, counted over all ranks that see other samples.

    ``number`` is below ``of``, the number of those that hold samples, but for a filler.
    ``samples`` is None where nobody knows them: forwards then draw by micro-batch.
    """

    number: int
    of: int
    samples: Samples | None = None

    @property
    def is_filler(self) -> bool:
        """Whether it only keeps a rank busy that no samples are left for."""
        return self.number >= self.of


class MicroBatch(NamedTuple):
    """What one forward of one process sees.

    ``batch`` is on the engine's device. ``weight`` may be 0 (a filler, in the ragged tail), the
    batch is never empty. ``rng_key`` seeds the forward's random numbers; None leaves them alone.
    ``place`` is None where nobody knows it: whatever ranks have of their own is then rank 0's.
    """

    batch: Any
    weight: float
    rng_key: int | None
    place: MicroBatchPlace | None = None


class StepWork(NamedTuple):
    """One step's work for this rank.

    ``weight`` is that of the whole global batch over all ranks; ``samples`` are global too.
    """

    micro_batches: list[MicroBatch]
    weight: float
    samples: int
    epoch: int
    ends_epoch: bool
