"""Open MPI's mpirun (and prterun)."""

from __future__ import annotations

from collections.abc import Mapping

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.mpi import ALLOCATIONS, OPENMPI, mpi_world
from torsh_trainer.environments.world import World


class OpenMPI(Environment):
    """Processes started by Open MPI."""

    name = "openmpi"
    priority = 50
    variables = (*OPENMPI.variables, *ALLOCATIONS)

    def world(self, env: Mapping[str, str]) -> World | None:
        if not OPENMPI.present(env):
            return None
        return mpi_world(OPENMPI, env, source=self.name)

    def absence(self, env: Mapping[str, str]) -> str:
        return OPENMPI.absence(env)
