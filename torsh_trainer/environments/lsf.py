"""LSF: jsrun (JSM), or an MPI launcher inside a job."""

from __future__ import annotations

from collections.abc import Mapping

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.mpi import JSM, OPENMPI, PMI, mpi_world
from torsh_trainer.environments.reading import is_set
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError


class Lsf(Environment):
    """Processes started by jsrun, or by mpirun inside an LSF job.

    LSB_MCPU_HOSTS (``batch1 1 node1 42 node2 42``) or LSB_HOSTS lists the hosts; under jsrun a
    first host with one slot is the launch node, on which no rank runs.
    """

    name = "lsf"
    priority = 70
    variables = (
        "LSB_JOBID",
        "LSB_MCPU_HOSTS",
        "LSB_HOSTS",
        *JSM.variables,
        *OPENMPI.variables,
        *PMI.variables,
    )

    def world(self, env: Mapping[str, str]) -> World | None:
        for layer in (JSM, OPENMPI, PMI):
            if layer.present(env) and (layer is JSM or is_set(env, "LSB_JOBID")):
                return mpi_world(
                    layer,
                    env,
                    source=self.name,
                    host=_host(env, jsrun=layer is JSM),
                    job=("LSB_JOBID",),
                    fix="export MASTER_ADDR with the first compute host of the job",
                )
        return None

    def absence(self, env: Mapping[str, str]) -> str:
        if not is_set(env, "LSB_JOBID"):
            return f"{JSM.absence(env)}, nor is LSB_JOBID"
        return "an LSF job, but neither jsrun nor mpirun told this process a rank"


def _host(env: Mapping[str, str], *, jsrun: bool) -> tuple[str, str] | None:
    """Rank 0's host and the reason."""
    if is_set(env, "LSB_MCPU_HOSTS"):
        words = env["LSB_MCPU_HOSTS"].split()
        hosts, slots = words[::2], words[1::2]
        if len(hosts) != len(slots) or not all(slot.isdigit() for slot in slots):
            raise ConfigError(
                f"cannot read LSB_MCPU_HOSTS={env['LSB_MCPU_HOSTS']!r}",
                fix="set MASTER_ADDR to rank 0's host",
            )
        launch_node = jsrun and len(hosts) > 1 and slots[0] == "1" and slots[1] != "1"
        host = hosts[1 if launch_node else 0]
        return host, f"LSB_MCPU_HOSTS={env['LSB_MCPU_HOSTS']} -> address {host}"
    if is_set(env, "LSB_HOSTS"):
        names = env["LSB_HOSTS"].split()
        launch_node = jsrun and len(names) > 1 and names.count(names[0]) == 1
        host = names[1 if launch_node else 0]
        return host, f"LSB_HOSTS={env['LSB_HOSTS']} -> address {host}"
    return None
