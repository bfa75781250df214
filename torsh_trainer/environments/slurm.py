"""SLURM's srun."""

from __future__ import annotations

from collections.abc import Mapping

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.hostlist import counts, first_host
from torsh_trainer.environments.reading import Reading, is_set, missing, node_of, number
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

_MARKS = ("SLURM_STEP_ID", "SLURM_PROCID")
_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SPECIAL_STEPS = 0xFFFFFFF0
"""Step numbers from here on are no srun: 4294967290 is the shell of an interactive salloc."""


class Slurm(Environment):
    """Tasks of an ``srun`` step.

    The shell of ``salloc`` and the script of ``sbatch`` carry SLURM_NTASKS too, but they are one
    process: only a step counts. RANK, LOCAL_RANK and WORLD_SIZE that differ from the step's come
    from a launcher inside the step, and win.
    """

    name = "slurm"
    priority = 30
    variables = (
        "SLURM_JOB_ID",
        *_MARKS,
        *_SIZES,
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NTASKS_PER_NODE",
        *_HOSTS,
        "MASTER_ADDR",
        "MASTER_PORT",
    )

    def world(self, env: Mapping[str, str]) -> World | None:
        if not self.is_step(env) or _is_launched_within(env):
            return None
        read = Reading(env, self.name)
        read.text("SLURM_STEP_ID", means="srun's step")
        rank = read.integer("SLURM_PROCID", means="rank") or 0
        size = read.integer(*_SIZES, means="size")
        if not size:
            raise ConfigError(
                f"SLURM_PROCID={rank} is set, but {missing(env, 'SLURM_NTASKS')}",
                fix="pass SLURM's variables on unchanged, or unset SLURM_STEP_ID",
            )
        nodes = read.integer("SLURM_STEP_NUM_NODES", "SLURM_NNODES", means="nodes") or 1
        node = read.integer("SLURM_NODEID", means="node") or 0
        local_rank = read.integer("SLURM_LOCALID", means="local rank")
        local_size = _local_size(read, size, nodes, node)
        if local_rank is None:
            local_rank = rank % local_size
            read.conclude(f"SLURM_LOCALID is not set -> local rank {local_rank}, by rank")
            node, nodes = node_of(rank, size, local_rank, local_size, read)
        host = None
        if nodes > 1 and "MASTER_ADDR" not in read:
            listed = read.text(*_HOSTS, means="nodes:")
            if listed is not None:
                host = first_host(listed)
                read.conclude(f"first of the nodes -> address {host}")
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=node,
            nodes=nodes,
            rendezvous=read.rendezvous(
                one_node=nodes == 1, host=host, job=("SLURM_JOB_ID", "SLURM_STEP_ID")
            ),
            source=self.name,
            reasons=tuple(read.reasons),
        )

    def is_step(self, env: Mapping[str, str]) -> bool:
        """Whether srun started this process, and not an allocation's shell."""
        if not all(is_set(env, name) for name in _MARKS):
            return False
        return number(env, "SLURM_STEP_ID") < _SPECIAL_STEPS

    def absence(self, env: Mapping[str, str]) -> str:
        if not is_set(env, "SLURM_JOB_ID") and not is_set(env, "SLURM_STEP_ID"):
            return missing(env, "SLURM_JOB_ID")
        if not self.is_step(env):
            return "the shell or script of an allocation, not a step; start N tasks with srun"
        return "RANK, LOCAL_RANK and WORLD_SIZE differ: another launcher runs inside the step"


def _is_launched_within(env: Mapping[str, str]) -> bool:
    pairs = (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID"))
    if not all(is_set(env, ours) for ours in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return False
    sizes = {env[name].strip() for name in _SIZES if is_set(env, name)}
    differs = any(env.get(theirs) != env[ours].strip() for ours, theirs in pairs)
    return differs or env["WORLD_SIZE"].strip() not in sizes


def _local_size(read: Reading, size: int, nodes: int, node: int) -> int:
    listed = read.text("SLURM_STEP_TASKS_PER_NODE", means="tasks on each node:")
    if listed is not None:
        tasks = counts(listed)
        if node < len(tasks):
            return tasks[node]
    told = read.integer("SLURM_NTASKS_PER_NODE", means="local size")
    if told and told * nodes == size:
        return told
    read.conclude(f"{size} tasks on {nodes} nodes -> local size {-(-size // nodes)}")
    return -(-size // nodes)
