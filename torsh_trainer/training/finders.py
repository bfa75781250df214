"""Looking for a learning rate or a batch size before training; nothing that was found is applied.

The finders train a throw-away engine and say what to set. They are stages of a run
(``trainer.stages=[find_lr]``), so every strategy and recipe has them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.batch import StepWork
from torsh_trainer.data.feed import TrainLoader
from torsh_trainer.data.sampler import BatchPartition
from torsh_trainer.errors import ConfigError, TrainingError
from torsh_trainer.strategies.base import BatchPlan, Clip, Engine
from torsh_trainer.tasks.base import Task
from torsh_trainer.training.out_of_memory import is_out_of_memory, release
from torsh_trainer.training.stages import StageContext

DIVERGED = 4.0
"""A loss of so many times the lowest one ends the search."""


@dataclass(frozen=True)
class LearningRates:
    """What the learning-rate finder saw: one rate and smoothed loss a step, and its suggestion."""

    name: ClassVar[str] = "lr_finder"

    suggestion: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]

    def __str__(self) -> str:
        return (
            f"learning-rate finder: the loss fell fastest near {self.suggestion:.2e} "
            f"({len(self.rates)} steps, {self.rates[0]:.1e} to {self.rates[-1]:.1e}); "
            f"try optimizer.lr={self.suggestion:.1e}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_lr(
    engine: Engine,
    steps: Any,
    task: Task,
    comm: Communicator,
    *,
    lowest: float = 1e-7,
    highest: float = 1.0,
    count: int = 100,
    smoothing: float = 0.9,
) -> LearningRates:
    """The learning-rate range test (L. N. Smith, 2017): rates rise exponentially, step by step.

    The suggestion is the rate at which the loss, smoothed exponentially and bias-corrected, falls
    fastest over the logarithm of the rate. ``steps`` is a feed.

    Raises:
        TrainingError: the loss never fell.
    """
    groups = [group for o in engine.optimizers.values() for group in o.param_groups]
    first = float(groups[0]["lr"]) or 1.0
    shares = [float(group["lr"]) / first for group in groups]
    rates: list[float] = []
    losses: list[float] = []
    average = 0.0
    for i, work in zip(range(count), steps, strict=False):
        rate = lowest * (highest / lowest) ** (i / max(1, count - 1))
        for group, share in zip(groups, shares, strict=True):
            group["lr"] = rate * share
        average = smoothing * average + (1.0 - smoothing) * _train(engine, work, task, comm)
        smooth = average / (1.0 - smoothing ** (i + 1))
        if not math.isfinite(smooth) or (losses and smooth > DIVERGED * min(losses)):
            break
        rates.append(rate)
        losses.append(smooth)
    return LearningRates(_steepest(rates, losses), tuple(rates), tuple(losses))


def _train(engine: Engine, work: StepWork, task: Task, comm: Communicator) -> float:
    engine.zero_grad()
    report = engine.forward_backward(work.micro_batches, work.weight, task)
    engine.step(Clip())
    local = sum(float(loss) * weight for loss, weight in report.parts if weight)
    return comm.reduce_values([local])[0] / work.weight


def find_lr_stage(context: StageContext) -> LearningRates:
    """The stage ``find_lr``."""
    engine = context.strategy.prepare(context.job, context.groups.data)
    try:
        return find_lr(engine, context.feed(context.cut), context.task, context.groups.loss)
    finally:
        engine.close()


def find_batch_size_stage(context: StageContext) -> BatchSizes:
    """The stage ``find_batch_size``."""

    def prepare(size: int) -> tuple[Engine, TrainLoader]:
        job = replace(context.job, batch=BatchPlan(size, size, 1, 1))
        engine = context.strategy.prepare(job, context.groups.data)
        return engine, context.feed(BatchPartition(size, size, 1, 0))

    most = len(context.task.data.train)
    return find_batch_size(prepare, context.task, context.comm, most=most)


def _steepest(rates: Sequence[float], losses: Sequence[float]) -> float:
    """The rate in the middle of the steepest fall, over windows of a tenth of the steps."""
    window = max(1, len(losses) // 10)
    slopes = [
        (losses[i + window] - losses[i], math.sqrt(rates[i] * rates[i + window]))
        for i in range(len(losses) - window)
    ]
    if not slopes or min(slopes)[0] >= 0.0:
        raise TrainingError(
            "the learning-rate finder saw no rate at which the loss falls",
            fix="check the data and the loss, or set optimizer.lr by hand",
        )
    return min(slopes)[1]


class BatchSizeTrial(NamedTuple):
    """One micro-batch size: samples per second, or None when it did not fit into memory."""

    micro_batch_size: int
    samples_per_s: float | None


@dataclass(frozen=True)
class BatchSizes:
    """What the batch-size finder saw: ``largest`` fits, ``suggestion`` is as fast and smaller.

    ``limit`` is what ended the search there.
    """

    name: ClassVar[str] = "batch_size_finder"

    suggestion: int
    largest: int
    trials: tuple[BatchSizeTrial, ...]
    limit: Literal["memory", "data"] = "memory"

    def __str__(self) -> str:
        tried = ", ".join(
            f"{t.micro_batch_size}: "
            + ("does not fit" if t.samples_per_s is None else f"{t.samples_per_s:.0f}/s")
            for t in self.trials
        )
        why = f"{self.largest} is the largest that fits"
        if self.limit == "data":
            why = f"{self.largest} fits, and the training data has no more for twice as many"
        return (
            f"batch-size finder: {tried}; {why}; {self.suggestion} is as fast; "
            f"try data.micro_batch_size={self.suggestion}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "suggestion": self.suggestion,
            "largest": self.largest,
            "trials": [trial._asdict() for trial in self.trials],
            "limit": self.limit,
        }


def find_batch_size(
    prepare: Callable[[int], tuple[Engine, Any]],
    task: Task,
    comm: Communicator,
    *,
    most: int,
    start: int = 1,
    steps: int = 3,
    as_fast: float = 0.95,
) -> BatchSizes:
    """Doubles the micro-batch until memory or ``most`` ends it.

    ``prepare(micro_batch_size)`` gives a fresh engine and a feed of it. The suggestion is the
    smallest size that reaches ``as_fast`` of the best throughput.

    Raises:
        ConfigError: there are several processes, or not even ``start`` fits.
    """
    if comm.world.is_distributed:
        raise ConfigError(
            "the batch-size finder runs in one process: out of memory on one rank hangs the others",
            fix="add launcher.num_processes=1 strategy=single",
        )
    trials: list[BatchSizeTrial] = []
    size = start
    while size <= most:
        speed = _attempt(prepare, size, task, comm, steps)
        trials.append(BatchSizeTrial(size, speed))
        if speed is None or (size < most and not _room(comm, 2.0)):
            break
        size *= 2
    fitting = [trial for trial in trials if trial.samples_per_s is not None]
    if not fitting:
        raise ConfigError(
            f"not even a micro-batch of {start} fits into the memory of {comm.device}",
            fix="use strategy=fsdp on several devices, or trainer.activation_checkpointing=true",
        )
    best = max(trial.samples_per_s or 0.0 for trial in fitting)
    suggestion = next(t for t in fitting if (t.samples_per_s or 0.0) >= as_fast * best)
    limit: Literal["memory", "data"] = "data" if size > most else "memory"
    return BatchSizes(
        suggestion.micro_batch_size, fitting[-1].micro_batch_size, tuple(trials), limit
    )


def _attempt(
    prepare: Callable[[int], tuple[Engine, Any]],
    size: int,
    task: Task,
    comm: Communicator,
    steps: int,
) -> float | None:
    """Samples per second in micro-batches of ``size``; None where they do not fit into memory."""
    try:
        return _speed(prepare, size, task, comm, steps)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        # Only now: what was raised has held the engine's tensors, by the frames of its traceback.
        release(comm.device)
    return None


def _speed(
    prepare: Callable[[int], tuple[Engine, Any]],
    size: int,
    task: Task,
    comm: Communicator,
    steps: int,
) -> float:
    engine, feed = prepare(size)
    try:
        works = iter(feed)
        _train(engine, next(works), task, comm)  # allocations and warm-up
        began = time.perf_counter()
        samples = 0
        for _ in range(steps):
            work = next(works)
            _train(engine, work, task, comm)
            samples += work.samples
        return samples / (time.perf_counter() - began)
    finally:
        engine.close()


def _room(comm: Communicator, factor: float) -> bool:
    """Whether the host could hold ``factor`` times this process; a GPU says so by itself."""
    statm = Path("/proc/self/statm")
    if comm.device.type != "cpu" or not statm.exists():
        return True
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(statm.read_text(encoding="ascii").split()[1]) * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    return resident * (factor - 1.0) < free
