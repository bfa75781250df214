"""What strategies of the Trainer and of Fabric do alike: begin, meet, and exchange values."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor

from torsh_trainer.comm import create
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.compression.base import Compression, NoCompression
from torsh_trainer.environments.slurm import Slurm
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, TorshError, nearest
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Job, Strategy
from torsh_trainer.utils import registry
from torsh_trainer_lightning import other, starting
from torsh_trainer_lightning.environment import (
    WorldEnvironment,
    outside,
    settle_environment,
    world_of,
)
from torsh_trainer_lightning.words import reword_errors


class Processes:
    """For a strategy of Lightning's over a ``Communicator``, which is None until they have met."""

    _comm: Communicator | None = None
    _num_nodes = 1
    _environment: ClusterEnvironment | None = None
    parallel_devices: list[torch.device] | None

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Whose processes these are; None until Lightning has said so."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, given: ClusterEnvironment | None) -> None:
        self._environment = settle_environment(given, os.environ)

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
        starting.has_met(self._comm)

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


class Chosen(Processes):
    """A strategy of Lightning's that the user makes around one of the trainer's.

    ``name`` is that of the strategy (``"ddp"``, ``"fsdp"``, ``"mpi"``, ``"horovod"``, ...), or one
    made already; ``knobs`` are its own, and None leaves one at its default. ``compression`` is how
    gradients travel, ``comm`` the knobs of the process group. ``precision`` is the trainer's own,
    for what Lightning's flag cannot say (fp32 masters under bf16, the dtype of reductions); without
    it the flag decides. The other arguments are those of every strategy of Lightning's.

    Raises:
        ConfigError: an unknown name or knob, or one that is out of range.
    """

    _launcher_class: ClassVar[type[Any]]
    _launcher: Any

    def __init__(
        self,
        name: str | Strategy = "ddp",
        *,
        compression: Compression = NoCompression(),
        precision: Precision | None = None,
        comm: CommOptions = CommOptions(),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Any = None,
        **knobs: Any,
    ) -> None:
        starting.leave_last_job()
        other.introduce(type(self))
        given = {knob: value for knob, value in knobs.items() if value is not None}
        with reword_errors(type(self).__name__, str(getattr(name, "name", name))):
            self.chosen = choose_strategy(name, given)
        if precision is not None and precision.is_auto:
            raise ConfigError(
                f'{type(self).__name__}(precision=Precision(compute="auto")): Lightning\'s own '
                "flag decides where nothing else does",
                fix="leave it out, or name what to compute in",
            )
        self.compression = compression
        self._comm_options = comm
        self._begin(
            precision,
            precision_plugin,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment or outside(os.environ),
            checkpoint_io=checkpoint_io,
        )

    def _begin(self, precision: Precision | None, plugin: Any, **lightnings: Any) -> None:
        """What is left of the constructor: precision, and Lightning's own arguments."""
        raise NotImplementedError

    @classmethod
    def from_name(cls, name: str, **knobs: Any) -> Any:
        """The one that Lightning makes of a registered name, and gives its environment."""
        made = cls(name, **knobs)
        made.cluster_environment = None
        return made

    @property
    def accelerator(self) -> Any:
        """What the Trainer or Fabric has chosen."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        other.check_accelerator(accelerator)
        self._accelerator = accelerator

    def _reword_errors(self) -> contextlib.AbstractContextManager[None]:
        """Within, errors speak as a script does."""
        return reword_errors(type(self).__name__, self.chosen.name)

    def _resolve(self, job: Job) -> Strategy:
        """The strategy that trains ``job`` over these processes.

        Parameters that a step does not reach are a fault where several processes wait for one
        another's gradients; one process trains on.
        """
        strategy: Any = self.chosen.resolve(job, self.comm)
        static = getattr(strategy, "static_graph", False)
        if self.comm.world.size == 1 and not static and strategy.name in _REFUSE_UNUSED:
            strategy = dataclasses.replace(strategy, find_unused_parameters=True)
        resolved: Strategy = strategy
        return resolved

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        size = self.num_nodes * self.num_processes
        with self._reword_errors():
            self.chosen.mesh(World(size=size, nodes=self.num_nodes))
        if isinstance(environment, WorldEnvironment):
            environment.validate_settings(self.num_processes, self.num_nodes)
        if size > 1:
            _check_step(environment)
            self._launcher = self._launcher_class(environment, self.num_processes, self.num_nodes)


_REFUSE_UNUSED = ("ddp", "gloo", "nccl", "mpi")
"""Strategies that want a gradient for every parameter, unless told otherwise."""


def _check_step(environment: ClusterEnvironment) -> None:
    """Refuses a process that Lightning takes for one of a step of Slurm's, and that is none."""
    if isinstance(environment, SLURMEnvironment) and not Slurm().is_step(os.environ):
        raise ConfigError(
            "this process is the script of an allocation of Slurm's, and not one of several that "
            "srun has started",
            fix="write srun before python; or have the processes started here, with "
            "cluster_environment=LightningEnvironment()",
        )


def choose_strategy(name: str | Strategy, knobs: Mapping[str, Any]) -> Strategy:
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
    known = {field.name: field for field in dataclasses.fields(kind)}
    for knob in knobs:
        if knob not in known:
            raise ConfigError(f"strategy={name} has no knob {knob!r}", fix=nearest(knob, known))
    made: Strategy = kind(
        **{
            # What comes from YAML or a command line knows no tuples.
            knob: tuple(value) if isinstance(known[knob].default, tuple) else value
            for knob, value in knobs.items()
        }
    )
    return made


def signature_of(kind: type[Chosen], names: Iterable[str]) -> inspect.Signature:
    """That of the constructor of ``kind``, with every knob of the strategies called ``names``.

    For whatever builds command lines of signatures, such as LightningCLI. A strategy whose library
    is not installed has none.
    """
    given = inspect.signature(kind.__init__)
    own = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
    knobs: dict[str, inspect.Parameter] = {}
    for name in names:
        with contextlib.suppress(TorshError):
            for field in dataclasses.fields(registry.strategy_class(name)):
                knobs[field.name] = inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any
                )
    return given.replace(
        parameters=[*own, *(k for n, k in knobs.items() if n not in given.parameters)]
    )


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Without gradients, and not in inference mode: what an engine gathers there stays in use."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
