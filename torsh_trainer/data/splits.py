"""The datasets of a task, made under the run's seed wherever they are made."""

from __future__ import annotations

import contextlib
from typing import Any

from torsh_trainer.data.draws import drawing_from
from torsh_trainer.data.sampler import mix
from torsh_trainer.tasks.base import Task


def making_data(seed: int) -> contextlib.AbstractContextManager[None]:
    """Around what makes data: its draws follow from the run's ``seed`` alone, on every rank.

    Every block begins at the same place, so that a source that splits anew for ``train`` and for
    ``eval`` splits alike.
    """
    return drawing_from(mix(seed, 0x64617461))  # another stream than the order of samples


def dataset_of(task: Task, split: str, *, seed: int) -> Any:
    """The dataset of a split, made now if it had not been; None where there is none."""
    with making_data(seed):
        return getattr(task.data, split)
