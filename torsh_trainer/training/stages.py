"""The contract of a stage beside fit, evaluate, test and predict: what it is given, what it gives.

A stage is a function of a ``StageContext``, called on every process of the run, that gives a
``program.Finding``: printed, and kept in result.json. Ours are the finders. Tasks that bring their
own loop have none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.feed import TrainLoader
from torsh_trainer.data.sampler import BatchPartition
from torsh_trainer.mesh import Groups
from torsh_trainer.strategies.base import Job, Strategy
from torsh_trainer.tasks.base import Task
from torsh_trainer.training.run_spec import RunSpec


@dataclass(frozen=True)
class StageContext:
    """What a stage works with.

    ``strategy.prepare(job, groups.data)`` makes an engine, which the stage closes. ``feed(cut)``
    are the training samples from the beginning, a step at a time; ``cut`` is how this run cuts
    them. ``comm`` are all processes.
    """

    spec: RunSpec
    task: Task
    strategy: Strategy
    job: Job
    comm: Communicator
    groups: Groups
    run_dir: Path
    cut: BatchPartition
    feed: Callable[[BatchPartition], TrainLoader]
