"""Legacy DataParallel: one process that drives several devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import Engine, Job, Mesh, Strategy
from torsh_trainer.strategies.compressing import compressing
from torsh_trainer.strategies.native import NativeEngine


@dataclass(frozen=True)
class DP(Strategy):
    """torch.nn.DataParallel over ``device_ids`` (null: every CUDA device of this host).

    The micro-batch is cut over the devices inside forward; the loss is taken over all outputs, so
    the gradient is that of one process.
    """

    name: ClassVar[str] = "dp"
    device_ids: tuple[int, ...] | None = None

    def needs_process_group(self, world: World) -> bool:
        return False

    def mesh(self, world: World) -> Mesh:
        if world.size != 1:
            raise ConfigError(
                f"strategy=dp is one process with several devices, and this job has {world.size}",
                fix="use strategy=ddp, or launcher.num_processes=1",
            )
        return Mesh()

    def cannot_compile(self) -> str:
        return "strategy=dp copies the model in each step"

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        if comm.device.type != "cuda":
            raise ConfigError(
                f"strategy=dp spreads one process over several GPUs, not over a {comm.device.type}",
                fix="use strategy=ddp launcher.num_processes=N, which also runs on a CPU",
            )
        if job.precision.params != "fp32":
            raise self.refuse(f"precision.params={job.precision.params}", use="use strategy=ddp")
        if job.compile is not None:
            raise self.refuse("trainer.compile=true", use="use strategy=ddp")
        compressing(self, job, comm)  # says that there is nothing to compress
        model = modules.build(job, comm)
        ids = None if self.device_ids is None else list(self.device_ids)
        module = nn.DataParallel(model, device_ids=ids)
        # A device sees a part of the micro-batch, and does not know which.
        job = replace(job, randomness="by_micro_batch")
        return NativeEngine(job, comm, model=model, module=module, eval_module=module)
