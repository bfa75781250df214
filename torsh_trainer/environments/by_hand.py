"""RANK, WORLD_SIZE and their like, set by hand, by a script or by another launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.reading import (
    LOOPBACK,
    Reading,
    first_rank,
    is_set,
    missing,
    number,
)
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

_SIGNS = ("RANK", "WORLD_SIZE", "NODE_RANK")
_NODE = ("NODE_RANK", "GROUP_RANK")


class ByHand(Environment):
    """The variables of torch's ``env://``, complete or not.

    What is missing is derived where it can be, and refused in one sentence where it cannot:

    - WORLD_SIZE from NNODES x LOCAL_WORLD_SIZE;
    - RANK from NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or from LOCAL_RANK on one node;
    - NODE_RANK may be the node's number or its first rank (see ``reading.first_rank``);
    - LOCAL_RANK from RANK and LOCAL_WORLD_SIZE, else one process per node, or all on this one when
      MASTER_ADDR is the loopback.

    A node's place without a process's (NODE_RANK without LOCAL_RANK, RANK as a node's first rank)
    is a world that the launcher ``local`` fills: see ``World.told``.
    """

    name = "env"
    priority = 10
    variables = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "NNODES",
        "MASTER_ADDR",
        "MASTER_PORT",
    )

    def world(self, env: Mapping[str, str]) -> World | None:
        if not any(is_set(env, name) for name in _SIGNS) and not _one_node_by_local(env):
            return None
        read = Reading(env, self.name)
        size, local_size = _sizes(read)
        place = _place(read, size, local_size)
        one_node = place.local_size == size
        return World(
            rank=place.rank,
            size=size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            node_rank=place.node,
            nodes=-(-size // place.local_size),
            rendezvous=read.rendezvous(one_node=one_node) if size > 1 else None,
            source=self.name,
            reasons=tuple(read.reasons),
            told=place.told,
        )

    def absence(self, env: Mapping[str, str]) -> str:
        return missing(env, *_SIGNS)


@dataclass(frozen=True)
class _Place:
    rank: int
    local_rank: int
    local_size: int
    node: int
    told: Literal["process", "rank", "node"] = "process"


def _one_node_by_local(env: Mapping[str, str]) -> bool:
    return is_set(env, "LOCAL_RANK") and is_set(env, "LOCAL_WORLD_SIZE")


def _sizes(read: Reading) -> tuple[int, int | None]:
    """(size, local size or None when nothing tells it).

    Raises:
        ConfigError: nothing tells the size, or the numbers contradict one another.
    """
    size = read.integer("WORLD_SIZE", means="size")
    local_size = read.integer("LOCAL_WORLD_SIZE", means="local size")
    nodes = read.integer("NNODES", means="nodes")
    if size is None:
        if local_size and (nodes or not is_set(read.env, "RANK")):
            size = (nodes or 1) * local_size
            read.conclude(f"no WORLD_SIZE -> size {size}")
        else:
            raise _no_size(read)
    if size < 1:
        raise ConfigError("WORLD_SIZE=0 leaves no process", fix="set it to 1 or more, or unset it")
    if local_size is None and nodes:
        local_size = size // nodes
        read.conclude(f"WORLD_SIZE / NNODES -> local size {local_size}")
    if local_size is not None and (
        not 0 < local_size <= size or (nodes and nodes * local_size != size)
    ):
        raise ConfigError(
            f"WORLD_SIZE={size} does not fit NNODES={nodes or '(unset)'} and "
            f"LOCAL_WORLD_SIZE={local_size}",
            fix="set WORLD_SIZE = NNODES x LOCAL_WORLD_SIZE, or leave one of them out",
        )
    first_node = all(number(read.env, name) == 0 for name in _NODE if name in read)
    if local_size is None and first_node and read.env.get("MASTER_ADDR", "").strip() in LOOPBACK:
        local_size = size
        read.conclude(f"MASTER_ADDR is this host -> local size {size}")
    return size, local_size


def _no_size(read: Reading) -> ConfigError:
    name = next(name for name in (*_SIGNS, "LOCAL_RANK") if name in read)
    return ConfigError(
        f"{name}={read.env[name].strip()} is set, but WORLD_SIZE is not, so that nothing tells how "
        f"many processes there are",
        fix=f"set WORLD_SIZE (and MASTER_ADDR), or unset {name} to run one process",
    )


def _place(read: Reading, size: int, local_size: int | None) -> _Place:
    rank = read.integer("RANK", means="rank")
    local_rank = read.integer("LOCAL_RANK", means="local rank")
    if rank is not None:
        return _by_rank(read, rank, local_rank, local_size)
    node_name = next((name for name in _NODE if name in read), None)
    if node_name is not None:
        node = read.integer(node_name, means="node") or 0
        return _by_node(read, node_name, node, local_rank, size, local_size)
    if local_rank is not None and local_size == size:
        read.conclude("one node -> rank = local rank")
        return _Place(local_rank, local_rank, size, 0)
    if size == 1:
        return _Place(0, 0, 1, 0)
    raise ConfigError(
        f"WORLD_SIZE={size}, but neither RANK nor NODE_RANK says which of the processes this is",
        fix="set RANK (or start with torchrun, srun or mpirun), or unset WORLD_SIZE to run alone",
    )


def _by_rank(read: Reading, rank: int, local_rank: int | None, local_size: int | None) -> _Place:
    if local_rank is None:
        size_here = local_size or 1
        if local_size is None:
            read.conclude("nothing tells the place on the node -> one process per node")
        else:
            read.conclude(f"no LOCAL_RANK -> local rank {rank % size_here}, by rank")
        return _Place(rank, rank % size_here, size_here, rank // size_here, told="rank")
    if local_size is None:
        if local_rank:
            raise ConfigError(
                f"RANK={rank} and LOCAL_RANK={local_rank}, but LOCAL_WORLD_SIZE is not set",
                fix="set LOCAL_WORLD_SIZE to the number of processes per node",
            )
        read.conclude("no LOCAL_WORLD_SIZE -> one process per node")
        local_size = 1
    node = read.integer(*_NODE, means="node")
    if node is None or node * local_size + local_rank != rank:  # or a node's first rank
        node = rank // local_size
    return _Place(rank, local_rank, local_size, node)


def _by_node(
    read: Reading,
    name: str,
    node: int,
    local_rank: int | None,
    size: int,
    local_size: int | None,
) -> _Place:
    if local_size is None:
        if local_rank:
            raise ConfigError(
                f"{name}={node} and LOCAL_RANK={local_rank}, but LOCAL_WORLD_SIZE is not set",
                fix="set LOCAL_WORLD_SIZE to the number of processes per node, or set RANK",
            )
        read.conclude(
            f"one process per node unless launcher.num_processes says more -> rank {node}"
        )
        return _Place(node, 0, 1, node, told="node")
    first = first_rank(node, per_node=local_size, size=size, name=name)
    index = first // local_size
    if index != node:
        read.conclude(f"{name}={node} is no node's number here -> node {index}, by its first rank")
    if local_rank is None:
        read.conclude(f"the launcher starts {local_size} processes -> ranks {first} and up")
        return _Place(first, 0, local_size, index, told="node" if local_size > 1 else "process")
    read.conclude(f"first rank {first} + local rank {local_rank} -> rank {first + local_rank}")
    return _Place(first + local_rank, local_rank, local_size, index)
