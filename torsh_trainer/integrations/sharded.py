"""A model of a script's own under FSDP2, stepped as a configuration says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.devices import choose_device
from torsh_trainer.comm.start import create
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.learning_rates import LearningRateDriver
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.precision import DTYPES, Precision
from torsh_trainer.optim.schedule.base import Schedule, StatefulSchedule
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, StepOutcome
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.tasks.base import Task
from torsh_trainer.translate.plan import Plan

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
"""Builds an optimizer over the parameters as they are once sharded."""


@dataclass(frozen=True)
class FSDPConfig:
    """How a model is sharded and stepped.

    ``accumulate`` backward passes make a step. ``optimizer`` and ``schedule`` are None where the
    script brings its own. ``plan`` is the translation that this came from, if any, and ``left`` are
    settings of it that are the script's business: its loader, its logs, how it is launched.
    """

    strategy: FSDP
    precision: Precision = Precision()
    clip: Clip = Clip()
    accumulate: int = 1
    skip_nonfinite: bool = False
    compile: bool = False
    optimizer: OptimizerSpec | None = None
    schedule: Schedule | StatefulSchedule | None = None
    plan: Plan | None = None
    left: Mapping[str, Any] = field(default_factory=dict)


class FullyShardedDataParallel(nn.Module):
    """``model`` with its parameters, gradients and optimizer state cut over all processes.

    Parameters become shards in place (FSDP2's ``fully_shard``), from rank 0's values; the device is
    this process's GPU, else the CPU. A step is ``accumulate`` times ``backward(loss)`` and
    ``step()``, as of DeepSpeed's engine: losses are means over a micro-batch, and all but the last
    ``step()`` of them do nothing. ``optimizer`` builds one over the shards, for a configuration
    that has none; ``total_steps`` is what a schedule spans that has no length of its own.

    Raises:
        ConfigError: there is no process group, two optimizers, or another model on another rank.
    """

    def __init__(
        self,
        model: nn.Module,
        config: FSDPConfig,
        *,
        optimizer: MakeOptimizer | None = None,
        total_steps: int | None = None,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ConfigError(
                "FullyShardedDataParallel cuts a model over processes, and there is no group",
                fix="call torch.distributed.init_process_group first, under torchrun say",
            )
        if optimizer is not None and config.optimizer is not None:
            raise ConfigError(
                "the configuration brings an optimizer, and optimizer= another",
                fix="leave out one of them",
            )
        self.config = config
        world = World()  # the group knows of the others
        self._comm = create(world, CommOptions(), choose_device("auto", world))
        script = _Script(config.optimizer, optimizer)
        job = _job(model, script, config, self._comm)
        self._engine = config.strategy.prepare(job, self._comm)
        self.module = self._engine.module
        self._pace = LearningRateDriver(config.schedule, self._engine.optimizers, total=total_steps)
        self._backwards = 0
        self._updates = 0

    @property
    def optimizer(self) -> Optimizer | None:
        """The one that ``step`` steps."""
        return next(iter(self._engine.optimizers.values()), None)

    @property
    def updates(self) -> int:
        """How often the parameters were updated; a step that overflowed is none."""
        return self._updates

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        precision = self.config.precision
        with (
            torch.autocast(self._comm.device.type, dtype=DTYPES[precision.compute])
            if precision.autocast
            else contextlib.nullcontext()
        ):
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of ``loss``, its share of the step, and communicates as configured.

        Raises:
            ConfigError: the loss is no scalar, or has no gradient.
        """
        self._backwards += 1
        last = self._backwards % self.config.accumulate == 0
        self._engine.backward(loss / self.config.accumulate, sync=last)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the last ``backward`` completed a step."""
        return self._backwards > 0 and self._backwards % self.config.accumulate == 0

    def step(self) -> StepOutcome | None:
        """Clips, updates and forgets the gradients; None while a step still accumulates.

        Raises:
            ConfigError: there is no optimizer.
        """
        if not self._engine.optimizers:
            raise ConfigError(
                "there is no optimizer to step: the configuration names none",
                fix="pass one: FullyShardedDataParallel(model, config, "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))",
            )
        if not self.is_gradient_accumulation_boundary():
            return None
        self._pace.before_update(self._updates)
        outcome = self._engine.step(self.config.clip, measure_norm=True)
        self._engine.zero_grad()
        if not outcome.skipped:
            self._updates += 1
            self._pace.after_update()
        return outcome

    def last_step(self) -> Mapping[str, float]:
        """What the last step used: ``loss_scale`` where the loss is scaled."""
        return self._engine.last_step()


class _Script(Task):
    """What a job knows of a script: its optimizer."""

    def __init__(self, spec: OptimizerSpec | None, make: MakeOptimizer | None) -> None:
        self._spec, self._make = spec, make

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        if self._spec is not None:
            return self._spec.build_all(named_parameters)
        if self._make is not None:
            return {"main": self._make([parameter for _, parameter in named_parameters])}
        return {}


def _job(model: nn.Module, script: Task, config: FSDPConfig, comm: Any) -> Job:
    size = comm.size
    return Job(
        task=script,
        build_model=lambda: model,
        batch=BatchPlan(config.accumulate * size, 1, config.accumulate, size),
        precision=config.precision,
        clip=config.clip,
        skip_nonfinite=config.skip_nonfinite,
        compile={} if config.compile else None,
    )
