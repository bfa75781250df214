"""The built-in environments keep the contract of environments."""

from typing import ClassVar

from torsh_trainer.environments.openmpi import OpenMPI
from torsh_trainer.environments.slurm import Slurm
from torsh_trainer.environments.torchrun import Torchrun
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.testing import EnvironmentContract

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "41673",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29700",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29700",
}


VARIABLES = {"torchrun": TORCHRUN, "srun": SRUN, "mpirun": MPIRUN}


def others(name):
    return {other: env for other, env in VARIABLES.items() if other != name}


class TestTorchrun(EnvironmentContract):
    environment = Torchrun()
    samples: ClassVar = {
        "on_the_second_node_after_two_restarts": (
            TORCHRUN,
            World(
                rank=5,
                size=8,
                local_rank=1,
                local_size=4,
                node_rank=1,
                nodes=2,
                rendezvous=Rendezvous("node01", 41673, hosted=True, attempt=2),
                source="torchrun",
            ),
        )
    }
    foreign = others("torchrun")
    contradictions: ClassVar = {
        "rank_beyond_the_size": {**TORCHRUN, "RANK": "8"},
        "no_local_rank": {k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"},
    }


class TestSlurm(EnvironmentContract):
    environment = Slurm()
    samples: ClassVar = {
        "last_task_of_two_nodes": (
            SRUN,
            World(
                rank=3,
                size=4,
                local_rank=1,
                local_size=2,
                node_rank=1,
                nodes=2,
                rendezvous=Rendezvous("node01", 29700),
                source="slurm",
            ),
        )
    }
    foreign = others("srun")
    contradictions: ClassVar = {"rank_beyond_the_size": {**SRUN, "SLURM_PROCID": "4"}}


class TestOpenMPI(EnvironmentContract):
    environment = OpenMPI()
    samples: ClassVar = {
        "second_of_two": (
            MPIRUN,
            World(
                rank=1,
                size=2,
                local_rank=1,
                local_size=2,
                rendezvous=Rendezvous("127.0.0.1", 29700),
                source="openmpi",
            ),
        )
    }
    foreign = others("mpirun")
    contradictions: ClassVar = {"rank_beyond_the_size": {**MPIRUN, "OMPI_COMM_WORLD_RANK": "2"}}
