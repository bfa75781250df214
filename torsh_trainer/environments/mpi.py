"""What the environments of MPI launchers share: Open MPI, the PMI family, and JSM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torsh_trainer.environments.hostlist import first_host
from torsh_trainer.environments.reading import LOOPBACK, Reading, is_set, missing, node_of
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError


@dataclass(frozen=True)
class Layer:
    """The variables by which one kind of MPI launcher tells a process its place.

    Each field holds names that mean the same, the first one set is read.
    """

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    node: tuple[str, ...] = ()
    job: tuple[str, ...] = ()

    def present(self, env: Mapping[str, str]) -> bool:
        """Whether this launcher started the process."""
        return _any(env, self.rank) and _any(env, self.size)

    def absence(self, env: Mapping[str, str]) -> str:
        """Which of the two decisive variables is missing, by its first name."""
        names = [group[0] for group in (self.rank, self.size) if not _any(env, group)]
        return missing(env, *names)

    @property
    def variables(self) -> tuple[str, ...]:
        """All names, for ``explain``."""
        return (
            *self.rank,
            *self.size,
            *self.local_rank,
            *self.local_size,
            *self.node,
            *self.job,
            "MASTER_ADDR",
            "MASTER_PORT",
        )


OPENMPI = Layer(
    rank=("OMPI_COMM_WORLD_RANK",),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    # OMPI_COMM_WORLD_NODE_RANK is no node number: it counts the processes of all jobs on a node.
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
PMI = Layer(  # MPICH, Intel MPI (both Hydra), HPE Cray (PALS), MVAPICH2
    rank=("PMI_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK"),
    size=("PMI_SIZE", "PALS_APSIZE", "MV2_COMM_WORLD_SIZE"),
    local_rank=(
        "MPI_LOCALRANKID",
        "PMI_LOCAL_RANK",
        "PALS_LOCAL_RANKID",
        "MV2_COMM_WORLD_LOCAL_RANK",
    ),
    local_size=(
        "MPI_LOCALNRANKS",
        "PMI_LOCAL_SIZE",
        "PALS_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    node=("PALS_NODEID",),
    job=("PMI_JOBID", "PALS_APID", "I_MPI_HYDRA_UUID"),
)
JSM = Layer(
    rank=("JSM_NAMESPACE_RANK",),
    size=("JSM_NAMESPACE_SIZE",),
    local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE",),
)
ALLOCATIONS = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_JOBID", "LSB_JOBID")
"""What a launcher leans on when it runs inside a scheduler's job."""


def mpi_world(
    layer: Layer,
    env: Mapping[str, str],
    *,
    source: str,
    host: tuple[str, str] | None = None,
    job: tuple[str, ...] = (),
    fix: str = "mpirun -x MASTER_ADDR=HOST (Open MPI) or -genv MASTER_ADDR HOST (MPICH, Intel), "
    "where rank 0 runs on HOST",
) -> World:
    """The place that ``layer`` tells, for a process in which it is present.

    ``host`` is rank 0's host and the reason for it, as the scheduler lists it; ``job`` names the
    scheduler's variables that tell jobs apart.

    Raises:
        ConfigError: several nodes, and nothing says where rank 0 runs.
    """
    read = Reading(env, source)
    rank = read.integer(*layer.rank, means="rank") or 0
    size = read.integer(*layer.size, means="size") or 0
    local_rank = read.integer(*layer.local_rank, means="local rank")
    local_size = read.integer(*layer.local_size, means="local size")
    if local_rank is None or not local_size:
        local_rank, local_size = _guess_local(read, rank, size, local_rank)
    node_rank, nodes = node_of(rank, size, local_rank, local_size, read)
    told_node = read.integer(*layer.node, means="node")
    if told_node is not None and told_node < nodes:
        node_rank = told_node
    one_node = local_size >= size
    host_name = None
    if not one_node and "MASTER_ADDR" not in read:
        host = host or slurm_host(env)
        if host is not None:
            host_name, reason = host
            read.conclude(reason)
    jobs = (*job, "SLURM_JOB_ID", *layer.job)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        nodes=nodes,
        rendezvous=read.rendezvous(one_node=one_node, host=host_name, job=jobs, fix=fix),
        source=source,
        reasons=tuple(read.reasons),
    )


def slurm_host(env: Mapping[str, str]) -> tuple[str, str] | None:
    """The first host of a SLURM allocation, where mpirun puts rank 0."""
    if not is_set(env, "SLURM_JOB_NODELIST"):
        return None
    host = first_host(env["SLURM_JOB_NODELIST"])
    return host, f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']} -> address {host}"


def _guess_local(read: Reading, rank: int, size: int, local_rank: int | None) -> tuple[int, int]:
    """(local_rank, local_size) of a launcher that tells no places on the node."""
    if read.env.get("MASTER_ADDR", "").strip() in LOOPBACK:
        read.conclude(f"MASTER_ADDR is this host -> local rank {rank} of {size}")
        return rank, size
    if local_rank:
        raise ConfigError(
            f"local rank {local_rank} is told, but not how many processes share the node",
            fix="start with a launcher that tells it (MPI_LOCALNRANKS), or with torchrun",
        )
    read.conclude("nothing tells the place on the node -> one process per node")
    return 0, 1


def _any(env: Mapping[str, str], names: tuple[str, ...]) -> bool:
    return any(is_set(env, name) for name in names)
