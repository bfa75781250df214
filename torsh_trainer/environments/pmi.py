"""The PMI family: MPICH and Intel MPI (Hydra), HPE Cray (PALS), MVAPICH2."""

from __future__ import annotations

from collections.abc import Mapping

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.mpi import ALLOCATIONS, PMI, mpi_world
from torsh_trainer.environments.slurm import Slurm
from torsh_trainer.environments.world import World


class Pmi(Environment):
    """Processes started by mpiexec of MPICH's family.

    ``srun --mpi=pmi2`` sets PMI_RANK and PMI_SIZE as well, but nothing about nodes: where SLURM's
    own step agrees with them, it is left to SLURM.
    """

    name = "pmi"
    priority = 40
    variables = (*PMI.variables, *ALLOCATIONS)

    def world(self, env: Mapping[str, str]) -> World | None:
        if not PMI.present(env) or self._is_srun(env):
            return None
        return mpi_world(PMI, env, source=self.name)

    def absence(self, env: Mapping[str, str]) -> str:
        if PMI.present(env):
            return "srun set PMI_RANK and PMI_SIZE, and SLURM knows more"
        return PMI.absence(env)

    def _is_srun(self, env: Mapping[str, str]) -> bool:
        return (
            Slurm().is_step(env)
            and env.get("SLURM_PROCID") == env.get("PMI_RANK")
            and env.get("SLURM_NTASKS") == env.get("PMI_SIZE")
        )
