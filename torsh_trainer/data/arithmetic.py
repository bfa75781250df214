"""Batch arithmetic: ``batch_size = micro_batch_size * accumulate * data-parallel size``."""

from __future__ import annotations

from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError

DEFAULT_BATCH_SIZE = 64


def batch_numbers(
    loading: Loading, *, accumulate: int | None, dp_size: int
) -> tuple[int, int, int]:
    """(batch_size, micro_batch_size, accumulate), each given or derived from the others.

    Raises:
        ConfigError: the three contradict one another, or do not divide.
    """
    batch, micro = loading.batch_size, loading.micro_batch_size
    if accumulate is not None and accumulate < 1:
        raise ConfigError(f"trainer.accumulate={accumulate} is below 1", fix="1 is no accumulation")
    if batch is None and micro is None:
        batch = DEFAULT_BATCH_SIZE
    if batch is not None and micro is not None:
        derived = _divide(batch, micro * dp_size, f"data.micro_batch_size={micro}", dp_size)
        if accumulate is not None and accumulate != derived:
            raise ConfigError(
                f"data.batch_size={batch} is not data.micro_batch_size={micro} x "
                f"trainer.accumulate={accumulate} x {dp_size} processes",
                fix="give two of the three; the third follows",
            )
        return batch, micro, derived
    accumulate = accumulate or 1
    if batch is None:
        assert micro is not None
        return micro * accumulate * dp_size, micro, accumulate
    return (
        batch,
        _divide(batch, accumulate * dp_size, f"trainer.accumulate={accumulate}", dp_size),
        accumulate,
    )


def batch_numbers_on_resume(
    loading: Loading, *, accumulate: int | None, dp_size: int, saved_micro_batch_size: int
) -> tuple[int, int, int]:
    """(batch_size, micro_batch_size, accumulate) of a run that goes on on ``dp_size`` ranks.

    Where the knobs fix the global batch alone, the micro-batch stays as it was saved and
    accumulation follows; every forward then sees the samples that it would have seen, and drops
    the same units. Where that does not divide, the micro-batch is the largest below it that does:
    the gradient is the same, random numbers in a forward are others. It is for the caller to say
    so, whenever the micro-batch that comes out is not ``saved_micro_batch_size``. A micro-batch or
    an accumulation that the knobs fix themselves stands, as in ``batch_numbers``.

    Raises:
        ConfigError: the knobs contradict one another, or do not divide.
    """
    numbers = batch_numbers(loading, accumulate=accumulate, dp_size=dp_size)
    if accumulate is not None or loading.micro_batch_size is not None:
        return numbers
    batch, per_rank, _ = numbers
    micro = min(saved_micro_batch_size, per_rank)
    while per_rank % micro:
        micro -= 1
    return batch, micro, per_rank // micro


def _divide(batch: int, parts: int, what: str, dp_size: int) -> int:
    if batch % parts:
        below = batch // parts * parts
        near = f"{below} or {below + parts}" if below else str(parts)
        raise ConfigError(
            f"data.batch_size={batch} does not divide over {what} x {dp_size} processes",
            fix=f"data.batch_size={near} would",
        )
    return batch // parts


def fitting(loading: Loading, samples: int, dp_size: int, micro_batches: int) -> str:
    """What to set so that a global batch fits into ``samples``, and the numbers still divide.

    ``micro_batches`` are those of a global batch today, over all processes.
    """
    if samples < 1:
        return "check the data source"
    if samples < dp_size:
        return f"take {samples} processes or fewer (launcher.num_processes)"
    parts = micro_batches if micro_batches <= samples else dp_size
    micro = samples // parts
    knobs = [f"data.batch_size={micro * parts}"]
    if loading.micro_batch_size is not None:
        knobs.insert(0, f"data.micro_batch_size={micro}")
        if loading.batch_size is None and parts == micro_batches:
            knobs.pop()
    if parts != micro_batches:
        knobs.append(f"trainer.accumulate={parts // dp_size}")
    return f"set {' '.join(knobs)}" + (" or less" if len(knobs) == 1 and parts == 1 else "")
