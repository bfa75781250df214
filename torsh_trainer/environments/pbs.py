"""PBS (Torque, OpenPBS, PBS Professional)."""

from __future__ import annotations

from collections.abc import Mapping

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.mpi import OPENMPI, PMI, mpi_world
from torsh_trainer.environments.reading import is_set
from torsh_trainer.environments.world import World

_FIX = (
    "export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE) in the job script, and pass it on "
    "(mpirun -x MASTER_ADDR; Hydra and PALS do so by themselves)"
)


class Pbs(Environment):
    """Processes started by an MPI launcher inside a PBS job.

    PBS itself tells no process its place: PBS_NODEFILE names a file (which ``world``, a pure
    function of variables, does not open) that lists hosts, not ranks. So the rank is the MPI
    layer's, the job number makes the port, and several nodes need MASTER_ADDR. A job script
    without mpirun is one process.
    """

    name = "pbs"
    priority = 60
    variables = ("PBS_JOBID", "PBS_NODEFILE", *OPENMPI.variables, *PMI.variables)

    def world(self, env: Mapping[str, str]) -> World | None:
        if not is_set(env, "PBS_JOBID"):
            return None
        for layer in (OPENMPI, PMI):
            if layer.present(env):
                return mpi_world(layer, env, source=self.name, job=("PBS_JOBID",), fix=_FIX)
        return None

    def absence(self, env: Mapping[str, str]) -> str:
        if not is_set(env, "PBS_JOBID"):
            return "PBS_JOBID is not set"
        return "a PBS job, but no MPI launcher told this process a rank; start it with mpirun"
