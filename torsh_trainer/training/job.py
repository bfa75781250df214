"""What a run asks of its engine, from its knobs."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from torsh_trainer.data.arithmetic import batch_numbers
from torsh_trainer.data.sampler import mix
from torsh_trainer.errors import ConfigError
from torsh_trainer.mesh import Mesh
from torsh_trainer.optim.schedule.base import Schedule
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, Strategy
from torsh_trainer.tasks.base import Task
from torsh_trainer.tasks.weights import freeze
from torsh_trainer.training import pretrained
from torsh_trainer.training.run_spec import RunSpec

log = logging.getLogger(__name__)


def complete(spec: RunSpec, strategy: Strategy, *, dp_size: int) -> RunSpec:
    """With what the strategy's own configuration brings, where the run says nothing.

    Raises:
        ConfigError: batch sizes of the two do not divide.
    """
    schedule, loading = spec.schedule, spec.loading
    silent = schedule is None or (isinstance(schedule, Schedule) and schedule.constant)
    brought = dict(strategy.brings(schedule=None if silent or schedule is None else schedule.name))
    spec = replace(spec, schedule=brought.pop("schedule", schedule))
    if spec.precision.is_auto and "precision" in brought:
        spec = replace(spec, precision=spec.precision.like(brought["precision"]))
    sizes: dict[str, int | None] = {
        "batch_size": loading.batch_size,
        "micro_batch_size": loading.micro_batch_size,
        "accumulate": spec.accumulate,
    }
    taken = {}
    for name in sizes:
        # Two of them say it all.
        if sizes[name] is None and name in brought and list(sizes.values()).count(None) > 1:
            sizes[name] = taken[name] = brought[name]
    if not taken:
        return spec
    batch_size, micro_batch_size, accumulate = sizes.values()
    loading = replace(loading, batch_size=batch_size, micro_batch_size=micro_batch_size)
    try:
        batch_numbers(loading, accumulate=accumulate, dp_size=dp_size)
    except ConfigError as error:
        what = ", ".join(f"{name}={value}" for name, value in taken.items())
        raise ConfigError(
            f"strategy={strategy.name} brings {what} in its configuration: {error.sentence}",
            fix=error.fix,
        ) from error
    return replace(spec, loading=loading, accumulate=accumulate)


def scale_learning_rate(spec: RunSpec, mesh: Mesh) -> Task:
    """The task with its learning rate scaled by the data-parallel size, where asked for."""
    task = spec.task
    if task.optimizer.lr_scaling == "none":
        return task
    task = copy.copy(task)
    task.optimizer = task.optimizer.scale_rates(mesh.dp)
    return task


def _check_scaling(spec: RunSpec) -> None:
    scaling = spec.task.optimizer.lr_scaling
    if scaling != "none" and spec.loading.batch_size is not None:
        raise ConfigError(
            f"optimizer.lr_scaling={scaling} belongs to a fixed micro-batch: under data.batch_size="
            f"{spec.loading.batch_size} the number of processes changes no result",
            fix="set data.micro_batch_size and data.batch_size=null, or optimizer.lr_scaling=none",
        )


def make_job(spec: RunSpec, task: Task, batch: BatchPlan) -> Job:
    """What a run in steps of ``batch`` asks of its engine.

    Raises:
        ConfigError: the learning rate is to follow a number of processes that changes no result.
    """
    _check_scaling(spec)
    return Job(
        task=task,
        build_model=partial(_build_model, spec, task),
        batch=batch,
        precision=spec.precision,
        compression=spec.compression,
        clip=Clip(spec.max_grad_norm, spec.max_grad_value),
        activation_checkpointing=spec.activation_checkpointing,
        checkpoint_modules=tuple(spec.checkpoint_modules),
        ema_decay=spec.ema_decay,
        skip_nonfinite=spec.on_nonfinite == "skip",
        sync_batchnorm=spec.sync_batchnorm,
        max_steps=spec.max_steps,
        seed=spec.seed,
        emulation=spec.emulation,
        deterministic=spec.deterministic,
        randomness=spec.randomness,
    )


def _build_model(spec: RunSpec, task: Task) -> nn.Module:
    """A seeded, pretrained and frozen module on the CPU, the same on every rank."""
    torch.manual_seed(mix(spec.seed, -1))
    model = task.build_model()
    if spec.pretrained is not None:
        report = pretrained.start_from(model, spec.pretrained, strict=spec.pretrained_strict)
        log.info("%s", report)
    if spec.frozen:
        names = freeze(model, spec.frozen)
        log.info("%d parameters are frozen", len(names))
    return model
