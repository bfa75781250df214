"""All-reduce by other routes than the backend's own, over send and receive or over groups.

Each gives what ``all_reduce`` gives, up to the rounding of sums in another order. Which is fastest
depends on the size, the network and the backend: ``python -m torsh_trainer comm bench
--algorithms`` measures them, and ``tuning.AlgorithmTable`` chooses.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm.failures import CollectiveArgumentError
from torsh_trainer.distributed import checking, collectives, groups, process_group
from torsh_trainer.distributed.checking import CollectiveCall
from torsh_trainer.distributed.collective_run import Op, reduction
from torsh_trainer.distributed.process_group import Group, ProcessGroup, ReduceOp

_COMBINE: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.AVG: Tensor.add_,
    ReduceOp.PRODUCT: Tensor.mul_,
    ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    ReduceOp.BAND: Tensor.bitwise_and_,
    ReduceOp.BOR: Tensor.bitwise_or_,
    ReduceOp.BXOR: Tensor.bitwise_xor_,
}


def flat_all_reduce(tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None) -> None:
    """The backend's own all-reduce."""
    collectives.all_reduce(tensor, op, group)


def ring_all_reduce(tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None) -> None:
    """Around a ring: every member sends 2 (n - 1) / n of the tensor, in 2 (n - 1) steps.

    Moves the fewest bytes (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters
    of workstations, 2009), and waits for a neighbour 2 (n - 1) times.
    """
    members, operation, combine = _ready(tensor, op, group, "ring_all_reduce")
    size, rank = members.world_size(), members.rank()
    if not members.is_member or size == 1:
        return
    flat = tensor.contiguous().view(-1)
    chunks = list(flat.tensor_split(size))
    room = torch.empty_like(chunks[0])
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):  # my chunk ends as the reduction of everybody's
        given, taken = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        part = room[: taken.numel()]
        _exchange(members, "ring_all_reduce", given, after, part, before)
        combine(taken, part)
    _divide(chunks[(rank + 1) % size], operation, size)
    for step in range(size - 1):
        given, taken = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
        _exchange(members, "ring_all_reduce", given, after, taken, before)
    _into(tensor, flat)


def tree_all_reduce(tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None) -> None:
    """Up a binomial tree to the first member, and down again: 2 log2(n) steps of whole tensors."""
    members, operation, combine = _ready(tensor, op, group, "tree_all_reduce")
    size, rank = members.world_size(), members.rank()
    if not members.is_member or size == 1:
        return
    flat = tensor.contiguous().view(-1)
    room = torch.empty_like(flat)
    distance = 1
    while distance < size:
        if rank % (2 * distance):
            _exchange(members, "tree_all_reduce", flat, rank - distance, None, None)
            break
        if rank + distance < size:
            _exchange(members, "tree_all_reduce", None, None, room, rank + distance)
            combine(flat, room)
        distance *= 2
    if rank == 0:
        _divide(flat, operation, size)
    while distance >= 1:
        if rank % (2 * distance) == 0 and rank + distance < size:
            _exchange(members, "tree_all_reduce", flat, rank + distance, None, None)
        elif rank % (2 * distance) == distance:
            _exchange(members, "tree_all_reduce", None, None, flat, rank - distance)
        distance //= 2
    _into(tensor, flat)


class HierarchicalAllReduce:
    """Within each host, then among one process of each, then within each host again.

    Only one process of a host uses the network. ``ranks_per_node`` None finds the hosts; making one
    is collective over all processes of the job, in the same order everywhere.

    Raises:
        CollectiveArgumentError: ``ranks_per_node`` does not divide the number of members.
    """

    def __init__(self, group: Group = None, *, ranks_per_node: int | None = None) -> None:
        self._members = process_group.resolve(group)
        nodes = _nodes(self._members, ranks_per_node)
        self.nodes = nodes
        """The ranks of every host."""
        mine = dist.get_rank()
        self._local: ProcessGroup | None = None
        for node in nodes:
            made = groups.new_group(node)
            self._local = made if mine in node else self._local
        self._leaders = groups.new_group([node[0] for node in nodes])
        self._leader = next((node[0] for node in nodes if mine in node), -1)

    def __call__(self, tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None) -> None:
        """Reduces ``tensor`` over the members, in place."""
        if self._local is None:
            return
        operation = reduction(op, tensor)
        partly = ReduceOp.SUM if operation == ReduceOp.AVG else operation
        collectives.reduce(tensor, self._leader, partly, self._local)
        if self._leaders.is_member:
            collectives.all_reduce(tensor, partly, self._leaders)
            _divide(tensor, operation, self._members.world_size())
        collectives.broadcast(tensor, self._leader, self._local)


_hierarchies: dict[int | None, tuple[Any, HierarchicalAllReduce]] = {}
process_group.on_leaving(_hierarchies.clear)


def hierarchical_all_reduce(
    tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None, *, ranks_per_node: int | None = None
) -> None:
    """See ``HierarchicalAllReduce``; the groups are made in the first call and kept.

    Raises:
        CollectiveArgumentError: ``group`` is only a part of the job, whose other processes would
            have to take part in making groups.
    """
    whole = dist.group.WORLD
    if process_group.resolve(group).process_group is not whole:
        raise CollectiveArgumentError(
            "hierarchical_all_reduce works among all processes of the job",
            fix="make HierarchicalAllReduce(group) on every process, and call that",
        )
    kept = _hierarchies.get(ranks_per_node)
    if kept is None or kept[0] is not whole:
        kept = (whole, HierarchicalAllReduce(ranks_per_node=ranks_per_node))
        _hierarchies[ranks_per_node] = kept
    kept[1](tensor, op)


ALGORITHMS: dict[str, Callable[[Tensor, Op, Group], None]] = {
    "flat": flat_all_reduce,
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}


def routes_for(group: ProcessGroup) -> list[str]:
    """The names of the routes that ``group`` can take."""
    whole = group.process_group is dist.group.WORLD
    return [name for name in ALGORITHMS if whole or name != "hierarchical"]


def exchange(group: ProcessGroup, given: Tensor, dst: int, taken: Tensor, src: int) -> None:
    """Sends ``given`` to rank ``dst`` and receives ``taken`` from ``src``, both at once."""
    to, source = group.ranks.index(dst), group.ranks.index(src)
    _exchange(group, "exchange", given, to, taken, source)


# -- details ---------------------------------------------------------------------------------------


def _ready(
    tensor: Tensor, op: Op, group: Group, name: str
) -> tuple[ProcessGroup, Any, Callable[[Tensor, Tensor], Any]]:
    members = process_group.resolve(group)
    operation = reduction(op, tensor)
    if operation not in _COMBINE:
        raise CollectiveArgumentError(f"{name} does not know {operation}", fix="use all_reduce")
    if members.is_member and checking.is_checked():
        checking.compare(members, CollectiveCall.of(name, [tensor], op=operation))
    return members, operation, _COMBINE[operation]


def _exchange(
    members: ProcessGroup,
    name: str,
    given: Tensor | None,
    to: int | None,
    taken: Tensor | None,
    source: int | None,
) -> None:
    """Sends and receives at once; empty tensors do not travel."""
    pg = members.process_group
    operations = []
    if given is not None and to is not None and given.numel():
        operations.append(dist.P2POp(dist.isend, given, members.ranks[to], pg))
    if taken is not None and source is not None and taken.numel():
        operations.append(dist.P2POp(dist.irecv, taken, members.ranks[source], pg))
    if not operations:
        return
    try:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise checking.explain_failure(members, name, error) from error


def _divide(tensor: Tensor, operation: Any, size: int) -> None:
    if operation == ReduceOp.AVG:
        tensor.div_(size)


def _into(tensor: Tensor, flat: Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _nodes(members: ProcessGroup, ranks_per_node: int | None) -> list[list[int]]:
    """The ranks of every host, or of every run of ``ranks_per_node`` members, on all processes."""
    # Over the whole job, as making groups is: a process outside learns here who the members are.
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (socket.gethostname(), members.ranks))
    ranks = max((ranks for _, ranks in places), key=len)
    if ranks_per_node is None:
        hosts: dict[str, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(places[rank][0], []).append(rank)
        return list(hosts.values())
    if ranks_per_node < 1 or len(ranks) % ranks_per_node:
        raise CollectiveArgumentError(
            f"{len(ranks)} processes do not divide into hosts of {ranks_per_node}",
            fix="give a divisor, or None to find the hosts",
        )
    return [ranks[start : start + ranks_per_node] for start in range(0, len(ranks), ranks_per_node)]
