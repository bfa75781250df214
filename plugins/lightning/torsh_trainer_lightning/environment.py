"""Whose process is this, in Lightning's words: a World as a ClusterEnvironment, and back."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from torsh_trainer import environments
from torsh_trainer.environments.by_hand import ByHand
from torsh_trainer.environments.slurm import Slurm
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError


class WorldEnvironment(ClusterEnvironment):
    """A place among processes that something else has started: torchrun, mpirun, srun, ..."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    @property
    def creates_processes_externally(self) -> bool:
        """They run already."""
        return True

    @property
    def main_address(self) -> str:
        """Where rank 0 serves the job's store."""
        return self.world.rendezvous.address if self.world.rendezvous else "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The port of that store."""
        return self.world.rendezvous.port if self.world.rendezvous else 0

    @staticmethod
    def detect() -> bool:
        """It is made for a world that has been found."""
        return False

    def world_size(self) -> int:
        """How many processes there are."""
        return self.world.size

    def global_rank(self) -> int:
        """This process's number among all."""
        return self.world.rank

    def local_rank(self) -> int:
        """This process's number on its host."""
        return self.world.local_rank

    def node_rank(self) -> int:
        """Its host's number."""
        return self.world.node_rank

    def set_world_size(self, size: int) -> None:
        """Nothing: it is told from outside."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing: it is told from outside."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises ConfigError where the Trainer speaks of another number of processes."""
        world = self.world
        if num_devices * num_nodes != world.size:
            raise ConfigError(
                f"{world.source} has started {world.size} processes, and the Trainer has "
                f"devices={num_devices} and num_nodes={num_nodes}",
                fix=f"give Trainer(devices={world.local_size}, num_nodes={world.nodes})",
            )


class StepEnvironment(WorldEnvironment, SLURMEnvironment):
    """A place in a step of Slurm's: Lightning saves and queues such a job again when asked to.

    ``like`` is one of Lightning's whose options for that are to be taken.
    """

    def __init__(self, world: World, like: SLURMEnvironment | None = None) -> None:
        self.world = world
        self.auto_requeue = True if like is None else like.auto_requeue
        self.requeue_signal = signal.SIGUSR1 if like is None else like.requeue_signal


class ScriptEnvironment(SLURMEnvironment):
    """The script or shell of an allocation of Slurm's: one process, whatever its variables say.

    ``like`` is Lightning's own, which looks for variables that only a step has.
    """

    def __init__(self, like: SLURMEnvironment) -> None:
        self.auto_requeue = like.auto_requeue
        self.requeue_signal = like.requeue_signal

    def world_size(self) -> int:
        """One."""
        return 1

    def global_rank(self) -> int:
        """The first."""
        return 0

    def local_rank(self) -> int:
        """The first on its host."""
        return 0

    def node_rank(self) -> int:
        """On the first host."""
        return 0


FOUND_BY_LIGHTNING = (
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
"""What Lightning takes by itself where it finds some variables, of which we read more."""


def settle_environment(
    given: ClusterEnvironment | None, variables: Mapping[str, str]
) -> ClusterEnvironment | None:
    """``given``, or what ``outside`` finds where Lightning would have found ``given`` by itself."""
    if type(given) not in FOUND_BY_LIGHTNING:
        return given
    found = outside(variables)
    if isinstance(found, StepEnvironment) and isinstance(given, SLURMEnvironment):
        return StepEnvironment(found.world, like=given)
    if isinstance(given, SLURMEnvironment) and not Slurm().is_step(variables):
        return ScriptEnvironment(given)
    return found or given


def outside(variables: Mapping[str, str]) -> WorldEnvironment | None:
    """The place that the variables of a launcher or a scheduler tell; None leaves it to Lightning.

    What is set by hand is Lightning's business: its own launcher sets the same variables.

    Raises:
        ConfigError: variables contradict one another.
    """
    for environment in environments.find_environments():
        world = None if isinstance(environment, ByHand) else environment.world(variables)
        if world is not None and world.told == "process" and world.size > 1:
            kind = StepEnvironment if isinstance(environment, Slurm) else WorldEnvironment
            return kind(world)
    return None


def world_of(environment: ClusterEnvironment, *, processes: int, nodes: int) -> World:
    """The world that an environment of Lightning's describes, of ``processes`` on each node."""
    if isinstance(environment, WorldEnvironment):
        return environment.world
    size = processes * nodes
    return World(
        rank=environment.global_rank(),
        size=size,
        local_rank=environment.local_rank(),
        local_size=processes,
        node_rank=environment.node_rank(),
        nodes=nodes,
        rendezvous=Rendezvous(environment.main_address, environment.main_port)
        if size > 1
        else None,
        source=type(environment).__name__,
    )
