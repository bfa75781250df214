"""Choosing a strategy from the world and the model."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import ClassVar

import torch

from torsh_trainer.comm.base import Communicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Engine, Job, Mesh, Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single

log = logging.getLogger(__name__)

BYTES_PER_PARAMETER = 16
"""fp32 weight, gradient and two Adam moments: the training state of one parameter."""


@dataclass(frozen=True)
class Auto(Strategy):
    """One process is ``single``; several are ``ddp``, or ``fsdp`` when the model is too large.

    Too large means that its training state (16 bytes a parameter) takes more than
    ``memory_fraction`` of the device's memory (of this process's share of host memory on a CPU).
    """

    name: ClassVar[str] = "auto"
    memory_fraction: float = 0.6

    def __post_init__(self) -> None:
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(
                f"strategy.memory_fraction={self.memory_fraction} is not in (0, 1]",
                fix="the default is 0.6",
            )

    def needs_process_group(self, world: World) -> bool:
        return world.is_distributed

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world)

    def resolve(self, job: Job, comm: Communicator) -> Strategy:
        chosen, why = self.choose(job, comm)
        log.info("strategy=auto takes %s: %s", chosen.name, why)
        return chosen

    def choose(self, job: Job, comm: Communicator) -> tuple[Strategy, str]:
        """The strategy to run and, in words, why."""
        if comm.size == 1:
            return Single(), "this job is one process"
        with torch.device("meta"):
            model = job.task.build_model()
        needed = BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
        memory = comm.reduce_values([_memory(comm)], op="min")[0]
        words = f"the model trains in {_gib(needed)} and a process has {_gib(memory)}"
        if needed > self.memory_fraction * memory:
            return FSDP(), f"{comm.size} processes, and {words}"
        return DDP(), f"{comm.size} processes, and {words}"

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        return self.resolve(job, comm).prepare(job, comm)


def _memory(comm: Communicator) -> float:
    """Bytes that one process may count on."""
    if comm.device.type == "cuda":
        return float(torch.cuda.get_device_properties(comm.device).total_memory)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / comm.world.local_size


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
