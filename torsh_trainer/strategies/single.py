"""One process, one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import DTYPES
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import Engine, Job, Mesh, Strategy
from torsh_trainer.strategies.compressing import compressing
from torsh_trainer.strategies.native import NativeEngine


@dataclass(frozen=True)
class Single(Strategy):
    """Plain torch on one device."""

    name: ClassVar[str] = "single"

    def needs_process_group(self, world: World) -> bool:
        return False

    def mesh(self, world: World) -> Mesh:
        if world.size != 1:
            raise ConfigError(
                f"strategy=single is one process, and this job has {world.size}",
                fix="use strategy=ddp, or launcher.num_processes=1",
            )
        return Mesh()

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        compressing(self, job, comm)  # says that there is nothing to compress
        model = modules.build(job, comm)
        module = computing(model, job)
        modules.compile_modules(job, [module])
        return NativeEngine(job, comm, model=model, module=module, eval_module=module)


def computing(model: nn.Module, job: Job) -> nn.Module:
    """The model as the precision asks for it: itself, or run in a lower dtype over fp32 masters."""
    dtype, output_dtype = DTYPES[job.precision.params], job.precision.output_dtype
    if dtype == torch.float32:
        return model
    return modules.ComputeIn(model, dtype, output_dtype=output_dtype)
