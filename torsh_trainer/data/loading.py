"""Knobs of loading, and batch arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torsh_trainer.errors import ConfigError


@dataclass(frozen=True)
class Loading:
    """How samples become batches (the shared knobs of the ``data`` group).

    ``batch_size`` is the global batch: all processes, all accumulated micro-batches.
    ``micro_batch_size`` is what one forward of one process sees. Of batch_size, micro_batch_size
    and ``trainer.accumulate`` give any two (accumulate counts as 1 when only a batch size is
    given). ``num_workers`` are loader processes for each training process; 0 loads in the loop,
    auto takes as many as the process has cores beside a GPU.
    ``drop_last`` leaves out the ragged tail of an epoch. ``seed_samples`` seeds the random numbers
    that a dataset draws for a sample from (seed, epoch, sample id), and those of a stream by global
    batch; null seeds generators that samples are seen to draw from, but for map datasets with
    ``__getitems__``, and true seeds all of them for every sample. ``own_state`` resumes a stream
    that keeps its own state from it; else it is read again up to the position.
    ``eval_batch_size`` (per process) null takes the micro-batch size.
    """

    batch_size: int | None = None
    micro_batch_size: int | None = None
    eval_batch_size: int | None = None
    shuffle: bool = True
    weighted: bool = False
    drop_last: bool = False
    num_workers: int | Literal["auto"] = 0
    prefetch_factor: int = 2
    pin_memory: bool | None = None
    seed_samples: bool | None = None
    own_state: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batch_size", "eval_batch_size", "prefetch_factor"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"data.{name}={value} is not a positive number", fix="give 1 or more"
                )
        if self.workers < 0:
            raise ConfigError(
                f"data.num_workers={self.num_workers} is negative",
                fix="give 0 to load in the training process",
            )

    @property
    def workers(self) -> int:
        """``num_workers`` as a number; auto is 0 until a run has chosen."""
        return 0 if self.num_workers == "auto" else self.num_workers
