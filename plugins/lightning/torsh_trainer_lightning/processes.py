"""What strategies of the Trainer and of Fabric do alike: meet, and exchange values."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor

from torsh_trainer import registry
from torsh_trainer.comm import create
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.world import World
from torsh_trainer_lightning.environment import world_of


class Processes:
    """For a strategy of Lightning's over a ``Communicator``, which is None until they have met."""

    _comm: Communicator | None = None
    _num_nodes = 1
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None

    @property
    def comm(self) -> Communicator:
        """The processes; they have met once ``setup_environment`` has run."""
        assert self._comm is not None
        return self._comm

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        if self._comm is not None:
            return self._comm.device
        assert self.parallel_devices is not None
        assert self.cluster_environment is not None
        return self.parallel_devices[self.cluster_environment.local_rank()]

    @property
    def num_nodes(self) -> int:
        """How many hosts there are, as Lightning was told."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """How many processes this host has."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which share of the samples is this process's."""
        world = self._world()
        return {"num_replicas": world.size, "rank": world.rank}

    def set_world_ranks(self) -> None:
        """Tells the environment, and whoever speaks on rank 0 alone, which process this is."""
        environment = self.cluster_environment
        assert environment is not None
        rank = environment.node_rank() * self.num_processes + environment.local_rank()
        environment.set_global_rank(rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        for speaker in (rank_zero_only, utilities_rank_zero_only):
            vars(speaker)["rank"] = environment.global_rank()

    def _world(self) -> World:
        assert self.cluster_environment is not None
        return world_of(
            self.cluster_environment, processes=self.num_processes, nodes=self.num_nodes
        )

    def _meet(self, strategy: Strategy, options: CommOptions) -> None:
        """Waits for the other processes; a second time changes nothing.

        Raises:
            TorshError: they did not come, or have no such backend.
        """
        if self._comm is not None:
            return
        device, world = self.root_device, self._world()
        strategy.membership(world, options)
        self._comm = create(
            world,
            strategy.comm_options(options),
            device,
            process_group=strategy.needs_process_group(world),
        )
        atexit.register(self._comm.close)

    # -- collectives -----------------------------------------------------------------------------

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any | str | None = "mean"
    ) -> Any:
        """The sum or the mean over ranks, in place."""
        if not isinstance(tensor, Tensor) or self._comm is None or self.comm.world.size == 1:
            return tensor
        if isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"):
            _sync_ddp_if_available(tensor, group, reduce_op="sum")  # which every backend has
            size = torch.distributed.get_world_size(group)
            return tensor.div_(size) if tensor.is_floating_point() else tensor.copy_(tensor / size)
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns when every process has come."""
        if self._comm is not None:
            self._comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``, on every rank."""
        return obj if self._comm is None else self._comm.broadcast_object(obj, src=src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Any:
        """The tensors of all ranks, stacked."""
        if self._comm is None or self.comm.world.size == 1:
            return tensor
        return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)


def chosen(name: str | Strategy, knobs: Mapping[str, Any]) -> Strategy:
    """The trainer's strategy of that name with these knobs.

    Raises:
        ConfigError: an unknown name or knob, or one that is out of range.
    """
    if isinstance(name, Strategy):
        if knobs:
            raise ConfigError(
                f"{next(iter(knobs))} is given beside a strategy that is made already",
                fix=f"give it to {type(name).__name__}",
            )
        return name
    kind = registry.strategy_class(name)
    known = [field.name for field in dataclasses.fields(kind)]
    for knob in knobs:
        if knob not in known:
            raise ConfigError(f"strategy={name} has no knob {knob!r}", fix=nearest(knob, known))
    made: Strategy = kind(**knobs)
    return made


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Without gradients, and not in inference mode: what an engine gathers there stays in use."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
