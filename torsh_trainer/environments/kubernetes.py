"""Kubernetes: the pods of an Indexed Job."""

from __future__ import annotations

from collections.abc import Mapping

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.reading import Reading, is_set, missing
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

_INDEX = "JOB_COMPLETION_INDEX"


class Kubernetes(Environment):
    """A pod of a Job with ``completionMode: Indexed``; the index is the node's number.

    WORLD_SIZE counts processes, NNODES pods, LOCAL_WORLD_SIZE processes per pod; any two give the
    third, and one alone means one process per pod. With several processes per pod and no
    LOCAL_RANK, the launcher ``local`` starts them. An index without any of these is a job of
    independent pods. MASTER_ADDR is ``<job>-0.<headless service>``.
    """

    name = "kubernetes"
    priority = 20
    variables = (
        _INDEX,
        "WORLD_SIZE",
        "NNODES",
        "LOCAL_WORLD_SIZE",
        "LOCAL_RANK",
        "RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )

    def world(self, env: Mapping[str, str]) -> World | None:
        sizes = ("WORLD_SIZE", "NNODES")
        if not is_set(env, _INDEX) or is_set(env, "RANK") or not any(is_set(env, s) for s in sizes):
            return None
        read = Reading(env, self.name)
        node = read.integer(_INDEX, means="pod") or 0
        size, nodes, per_pod = _sizes(read)
        if node >= nodes:
            raise ConfigError(
                f"{_INDEX}={node}, but there are {nodes} pods of {per_pod} processes",
                fix="make completions equal to NNODES (or WORLD_SIZE / LOCAL_WORLD_SIZE)",
            )
        local_rank = read.integer("LOCAL_RANK", means="local rank")
        starts_here = per_pod > 1 and local_rank is None
        if starts_here:
            read.conclude(f"no LOCAL_RANK -> the launcher starts {per_pod} processes in this pod")
        local_rank = local_rank or 0
        if local_rank >= per_pod:
            raise ConfigError(
                f"LOCAL_RANK={local_rank}, but a pod has {per_pod} processes",
                fix="set LOCAL_WORLD_SIZE to the number of processes per pod",
            )
        return World(
            rank=node * per_pod + local_rank,
            size=size,
            local_rank=local_rank,
            local_size=per_pod,
            node_rank=node,
            nodes=nodes,
            rendezvous=read.rendezvous(
                one_node=nodes == 1,
                fix="set it to <job>-0.<service>: a headless Service, subdomain in the pod's spec",
            ),
            source=self.name,
            reasons=tuple(read.reasons),
            told="node" if starts_here else "process",
        )

    def absence(self, env: Mapping[str, str]) -> str:
        if is_set(env, _INDEX) and is_set(env, "RANK"):
            return "RANK is set and says more than the pod's index"
        if is_set(env, _INDEX):
            return "an index, but neither WORLD_SIZE nor NNODES: pods that work independently"
        return missing(env, _INDEX)


def _sizes(read: Reading) -> tuple[int, int, int]:
    """(processes, pods, processes per pod)."""
    size = read.integer("WORLD_SIZE", means="size")
    nodes = read.integer("NNODES", means="pods")
    per_pod = read.integer("LOCAL_WORLD_SIZE", means="processes per pod")
    if size and nodes and per_pod is None:
        per_pod = size // nodes
    per_pod = per_pod or 1
    size = size or (nodes or 1) * per_pod
    nodes = nodes or size // per_pod
    if nodes * per_pod != size:
        raise ConfigError(
            f"{size} processes are not {nodes} pods of {per_pod}",
            fix="set WORLD_SIZE = NNODES x LOCAL_WORLD_SIZE, or leave one of them out",
        )
    return size, nodes, per_pod
