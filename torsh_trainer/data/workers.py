"""``data.num_workers=auto``: loader processes by the cores that a training process has."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from torch.utils.data import IterableDataset

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.feed import seeds_samples
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.splits import dataset_of
from torsh_trainer.tasks.base import Task

log = logging.getLogger(__name__)

_MOST = 16
"""More processes than this seldom read faster, and each has a copy of what it touches."""


def choose_workers(
    loading: Loading, task: Task, comm: Communicator, *, cores: int, seed: int
) -> Loading:
    """``loading`` with a number for ``num_workers=auto``; collective.

    ``cores`` are those that this process may use; processes of a node that may use the same ones
    share them. A core stays for the training process itself.
    """
    if loading.num_workers != "auto":
        return loading
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = (comm.world.node_rank, allowed)
    share = cores // comm.all_gather_object(mine).count(mine)
    number, why = max(0, min(_MOST, share - 1)), f"cores for this process: {share}"
    dataset = dataset_of(task, "train", seed=seed)
    if comm.device.type == "cpu":
        number, why = 0, "a CPU trains and reads with the same cores"
    elif isinstance(dataset, IterableDataset):
        number, why = 0, "the order of a stream depends on it"
    elif dataset is None or not seeds_samples(dataset, loading):
        number, why = 0, "no samples that are read and seeded one by one"
    log.info("data.num_workers=auto: %d loader processes (%s)", number, why)
    return replace(loading, num_workers=number)
