"""The communicator of one process: every collective is already done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.comm.base import Communicator, Reduction, Work, check_mean
from torsh_trainer.environments.world import ALONE, World
from torsh_trainer.errors import ConfigError


class Done:
    """A ``Work`` that has ended."""

    def wait(self) -> bool:
        """Returns at once."""
        return True


class LocalCommunicator(Communicator):
    """One process without a torch.distributed group, on ``device``."""

    backend = "local"
    process_group = None

    def __init__(self, device: torch.device | None = None, *, world: World = ALONE) -> None:
        if world.size != 1:
            raise ConfigError(
                f"{world.size} processes cannot share a communicator for one",
                fix="use torsh_trainer.comm.create",
            )
        self.world = world
        self.device = device or torch.device("cpu")

    def all_reduce(
        self, tensor: Tensor, *, op: Reduction = "sum", async_op: bool = False
    ) -> Work | None:
        check_mean(tensor, op)
        return Done() if async_op else None

    def reduce(self, tensor: Tensor, *, dst: int, op: Reduction = "sum") -> None:
        check_mean(tensor, op)
        _alone(dst)

    def broadcast(self, tensor: Tensor, *, src: int = 0, async_op: bool = False) -> Work | None:
        _alone(src)
        return Done() if async_op else None

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone()]

    def reduce_scatter(
        self, output: Tensor, tensors: Sequence[Tensor], *, op: Reduction = "sum"
    ) -> None:
        check_mean(output, op)
        (only,) = tensors
        output.copy_(only)

    def gather(self, tensor: Tensor, *, dst: int = 0) -> list[Tensor] | None:
        _alone(dst)
        return [tensor.clone()]

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, *, src: int = 0) -> None:
        _alone(src)
        (only,) = tensors or ()
        output.copy_(only)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        for output, value in zip(outputs, inputs, strict=True):
            output.copy_(value)

    def send(self, tensor: Tensor, *, dst: int, async_op: bool = False) -> None:
        raise _nobody("send to")

    def recv(self, tensor: Tensor, *, src: int, async_op: bool = False) -> None:
        raise _nobody("receive from")

    def barrier(self) -> None:
        return None

    def broadcast_object(self, value: Any, *, src: int = 0) -> Any:
        _alone(src)
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        for rank in ranks:
            _alone(rank)
        return LocalCommunicator(self.device, world=self.world) if ranks else None

    def close(self) -> None:
        return None


def _alone(rank: int) -> None:
    if rank != 0:
        raise ConfigError(f"rank {rank} is not one of this job's 1 processes", fix="it has rank 0")


def _nobody(verb: str) -> ConfigError:
    return ConfigError(
        f"a single process has nobody to {verb}", fix="start more with launcher.num_processes"
    )
