"""What the feed hands to an engine."""

from __future__ import annotations

from typing import Any, NamedTuple


class MicroBatch(NamedTuple):
    """What one forward of one process sees.

    ``batch`` is on the engine's device. ``weight`` may be 0 (a filler, in the ragged tail), the
    batch is never empty. ``rng_key`` seeds the forward's random numbers; None leaves them alone.
    """

    batch: Any
    weight: float
    rng_key: int | None


class Step(NamedTuple):
    """One step's work for this rank.

    ``weight`` is that of the whole global batch over all ranks; ``samples`` are global too.
    """

    micro_batches: list[MicroBatch]
    weight: float
    samples: int
    epoch: int
    ends_epoch: bool
