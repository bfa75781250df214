"""The contract of an environment: recognising a cluster by its variables."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

from torsh_trainer.environments.world import World


class Environment(abc.ABC):
    """A way in which processes come to know their place (torchrun, SLURM, mpirun, ...)."""

    name: ClassVar[str]
    variables: ClassVar[tuple[str, ...]]
    """Every variable that ``world`` looks at; ``explain`` shows those that are set."""

    steady: ClassVar[str] = ""
    """What to do for processes that stay to the end, where it may let them come and go."""
    priority: ClassVar[int] = 35
    """Environments are asked from the highest to the lowest. What starts a process last knows its
    place best, so launchers of processes (torchrun 90, horovod 80, lsf 70, pbs 60, openmpi 50,
    pmi 40) stand before the schedulers in whose jobs they run (slurm 30, kubernetes 20), and
    variables set by hand (10), which every process inherits, last. 35 is a scheduler's that is
    asked before ours."""

    @abc.abstractmethod
    def world(self, env: Mapping[str, str]) -> World | None:
        """This process's place, or None when the variables are not of this kind.

        A pure function of ``env``: it opens no file and asks no network. ``World.reasons`` says
        which variables decided, one line each: ``RANK=3 -> rank 3``.

        Raises:
            ConfigError: the variables are of this kind but contradict one another.
        """

    @abc.abstractmethod
    def absence(self, env: Mapping[str, str]) -> str:
        """Why ``world(env)`` is None, in a few words: ``OMPI_COMM_WORLD_RANK is not set``."""
