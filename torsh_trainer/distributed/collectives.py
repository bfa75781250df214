"""Collectives as functions: torch's names and signatures, tensors of any layout, typed errors.

Ranks are those of the whole job, in every group, as torch counts them. Tensors need not be
contiguous. With ``async_op=True`` a function returns a ``CollectiveWork`` at once, whose ``wait()``
gives what the function would have returned, or True where the result is in the tensors. On a
process outside of ``group`` a function warns and returns None.

Every function raises ``BackendNotInitialized`` without a process group, ``CollectiveArgumentError``
for arguments that are wrong in themselves, ``CommunicationError`` when the operation fails and,
where calls are compared (see ``set_check``), ``MismatchError``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm.failures import CollectiveArgumentError
from torsh_trainer.distributed.checking import CollectiveCall
from torsh_trainer.distributed.collective_run import (
    CollectiveWork,
    Op,
    find_peer,
    find_root,
    list_parts,
    list_splits,
    reduction,
    return_value,
    run_collective,
    split_average,
    write_all,
    write_back,
)
from torsh_trainer.distributed.process_group import Group, ProcessGroup, ReduceOp, resolve

log = logging.getLogger(__name__)

# -- reductions ------------------------------------------------------------------------------------


def all_reduce(
    tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduces ``tensor`` over all members, in place."""
    members = resolve(group)
    operation = reduction(op, tensor)
    buffer = tensor.contiguous()
    theirs, divisor = split_average(members, operation)
    return run_collective(
        members,
        CollectiveCall.of("all_reduce", [tensor], op=operation),
        lambda pg: dist.all_reduce(buffer, theirs, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: write_back(tensor, buffer, divisor),
    )


def reduce(
    tensor: Tensor,
    dst: Any = None,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """As ``all_reduce``, but only ``dst`` holds the result; the others keep their tensor.

    ``reduce(tensor, ReduceOp.SUM, 0)``, with the operation first, means the same.
    """
    if isinstance(op, int) and not isinstance(op, bool):
        dst, op = op, ReduceOp.SUM if dst is None else dst
    members = resolve(group)
    operation = reduction(op, tensor)
    root = find_root(members, dst, group_dst, "dst")
    takes = dist.get_rank() == root
    # gloo works in place on every member, so those who only give hand in a copy.
    buffer = tensor.contiguous() if takes else tensor.clone().contiguous()
    theirs, divisor = split_average(members, operation)
    return run_collective(
        members,
        CollectiveCall.of("reduce", [tensor], op=operation, root=root),
        lambda pg: dist.reduce(buffer, root, theirs, group=pg, async_op=True),
        async_op=async_op,
        finish=(lambda: write_back(tensor, buffer, divisor)) if takes else None,
    )


def reduce_scatter(
    output: Tensor,
    input: Any = None,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """``output`` becomes this member's part of the reduction.

    ``input`` is a list of parts, one for each member, or one tensor that holds them one after
    another. ``reduce_scatter(tensor)`` returns this member's chunk of ``tensor`` along its first
    dimension, which the number of members must divide.
    """
    members = resolve(group)
    if input is None:
        return _reduce_scattered(output, op, members, async_op)
    if isinstance(input, Tensor):
        return reduce_scatter_tensor(output, input, op, group, async_op)
    operation = reduction(op, output)
    parts = list_parts("reduce_scatter", members, input)
    buffer = output.contiguous()
    theirs, divisor = split_average(members, operation)
    return run_collective(
        members,
        CollectiveCall.of("reduce_scatter", parts, op=operation),
        lambda pg: dist.reduce_scatter(buffer, parts, theirs, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: write_back(output, buffer, divisor),
    )


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """``output`` becomes this member's part of the reduction of ``input``, which holds them all."""
    members = resolve(group)
    operation = reduction(op, output)
    if members.is_member and input.numel() != output.numel() * members.world_size():
        raise CollectiveArgumentError(
            f"reduce_scatter of {input.numel()} elements among {members.world_size()} members into "
            f"{output.numel()}",
            fix="the input holds one part for each member, as large as the output",
        )
    buffer, given = output.contiguous(), input.contiguous()
    theirs, divisor = split_average(members, operation)
    return run_collective(
        members,
        CollectiveCall.of("reduce_scatter", [input], op=operation),
        lambda pg: dist.reduce_scatter_single(
            buffer.view(-1), given.view(-1), theirs, group=pg, async_op=True
        ),
        async_op=async_op,
        finish=lambda: write_back(output, buffer, divisor),
    )


def _reduce_scattered(tensor: Tensor, op: Op, members: ProcessGroup, async_op: bool) -> Any:
    size = max(1, members.world_size())
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows % size or not rows:
        raise CollectiveArgumentError(
            f"reduce_scatter cannot cut a tensor of shape {list(tensor.shape)} into {size} chunks "
            "along its first dimension",
            fix="pad it, or pass an output and a list of parts",
        )
    chunk = tensor.new_empty((rows // size, *tensor.shape[1:]))
    work = reduce_scatter_tensor(chunk, tensor, op, members, async_op=async_op)
    return return_value(work, chunk) if async_op or not members.is_member else chunk


# -- moving ----------------------------------------------------------------------------------------


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Every member's ``tensor`` becomes that of ``src``, in place."""
    members = resolve(group)
    root = find_root(members, src, group_src, "src")
    buffer = tensor.contiguous()
    return run_collective(
        members,
        CollectiveCall.of("broadcast", [tensor], root=root),
        lambda pg: dist.broadcast(buffer, root, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: write_back(tensor, buffer),
    )


def all_gather(
    output: Any,
    tensor: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    concat: bool = False,
) -> Any:
    """The tensors of all members, everywhere; all of one shape and dtype.

    ``all_gather(tensor)`` returns them as a list, or as one tensor along their first dimension with
    ``concat``. ``all_gather(output_list, tensor)`` fills the list, ``all_gather(output, tensor)``
    one tensor that has room for all of them.
    """
    members = resolve(group)
    if tensor is None:
        return _all_gathered(output, members, async_op, concat)
    if isinstance(output, Tensor):
        return all_gather_into_tensor(output, tensor, group, async_op)
    mine = tensor.contiguous()
    buffers = list_parts("all_gather", members, output)
    return run_collective(
        members,
        CollectiveCall.of("all_gather", [tensor]),
        lambda pg: dist.all_gather(buffers, mine, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: write_all(output, buffers),
    )


def all_gather_into_tensor(
    output: Tensor, tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """``output`` holds the tensors of all members one after another."""
    members = resolve(group)
    if members.is_member and output.numel() != tensor.numel() * members.world_size():
        raise CollectiveArgumentError(
            f"all_gather of {tensor.numel()} elements from {members.world_size()} members into "
            f"{output.numel()}",
            fix="the output has room for the tensor of each member",
        )
    buffer, mine = output.contiguous(), tensor.contiguous()
    return run_collective(
        members,
        CollectiveCall.of("all_gather", [tensor]),
        lambda pg: dist.all_gather_single(buffer.view(-1), mine.view(-1), group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: write_back(output, buffer),
    )


def _all_gathered(tensor: Tensor, members: ProcessGroup, async_op: bool, concat: bool) -> Any:
    size = max(1, members.world_size())
    whole = tensor.new_empty((size, *tensor.shape))
    work = all_gather_into_tensor(whole, tensor, members, async_op=async_op)
    joined = whole.flatten(0, 1) if tensor.dim() else whole
    value = joined if concat else list(whole)
    return return_value(work, value) if async_op or not members.is_member else value


def all_gather_varsize(tensor: Tensor, group: Group = None) -> list[Tensor]:
    """The tensors of all members, of any shapes and one dtype; tells them the shapes first."""
    members = resolve(group)
    shapes: list[Any] = [None] * max(1, members.world_size())
    dist.all_gather_object(shapes, tuple(tensor.shape), group=members.process_group)
    counts = [torch.Size(shape).numel() for shape in shapes]
    padded = tensor.new_zeros(max(counts))
    padded[: tensor.numel()] = tensor.reshape(-1)
    gathered = all_gather(padded, group=members)
    return [
        part[:count].view(shape)
        for part, count, shape in zip(gathered, counts, shapes, strict=True)
    ]


def gather(
    tensor: Tensor,
    gather_list: Any = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """The tensors of all members on ``dst`` (default 0), nothing elsewhere.

    Without ``gather_list`` (and in the form ``gather(tensor, dst)``) the list is returned there.
    """
    if isinstance(gather_list, int):
        gather_list, dst = None, gather_list
    members = resolve(group)
    root = find_root(members, dst, group_dst, "dst", default=0)
    takes = dist.get_rank() == root
    mine = tensor.contiguous()
    given = gather_list if takes and gather_list is not None else None
    buffers: list[Tensor] | None = None
    if takes:
        room = [torch.empty_like(mine) for _ in members.ranks] if given is None else given
        buffers = list_parts("gather", members, room)

    def finish() -> list[Tensor] | None:
        if given is not None and buffers is not None:
            write_all(given, buffers)
            return None
        return buffers

    return run_collective(
        members,
        CollectiveCall.of("gather", [tensor], root=root),
        lambda pg: dist.gather(mine, buffers, dst=root, group=pg, async_op=True),
        async_op=async_op,
        finish=finish,
    )


def scatter(
    tensor: Tensor | None,
    scatter_list: Any = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """A part of what ``src`` (default 0) has, for each member.

    ``scatter(output, scatter_list, src)`` fills ``output``; parts are of one shape, and the list of
    any rank but ``src`` is not looked at. Two forms tell the members shapes first, so that parts
    may differ, and return this member's: ``scatter(tensor, src)`` cuts the tensor of ``src`` along
    its first dimension, the first parts a row longer where it does not divide, and
    ``scatter(None, scatter_list, src)`` hands out a list.
    """
    members = resolve(group)
    if isinstance(scatter_list, int):
        root = find_root(members, scatter_list, None, "src")
        whole = tensor if dist.get_rank() == root else None
        return _hand_out("scatter", members, root, lambda: _cut(whole, members), async_op)
    root = find_root(members, src, group_src, "src", default=0)
    gives = dist.get_rank() == root
    if tensor is None:
        return _hand_out("scatter", members, root, lambda: scatter_list, async_op)
    parts = list_parts("scatter", members, scatter_list) if gives else None
    buffer = tensor.contiguous()
    for part in parts or ():
        if part.numel() != buffer.numel():
            raise CollectiveArgumentError(
                f"scatter_list holds {[list(part.shape) for part in parts or ()]}, and the output "
                f"has shape {list(tensor.shape)}",
                fix="parts of different sizes go with scatter(None, scatter_list, src)",
            )
    return run_collective(
        members,
        CollectiveCall.of("scatter", [tensor], root=root),
        lambda pg: dist.scatter(buffer, parts, src=root, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: write_back(tensor, buffer),
    )


def _cut(tensor: Tensor | None, members: ProcessGroup) -> list[Tensor]:
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        raise CollectiveArgumentError(
            "scatter(tensor, src) cuts a tensor along its first dimension, and has none",
            fix="pass a tensor of one dimension or more on src",
        )
    return list(tensor.tensor_split(members.world_size()))


def _hand_out(
    operation: str,
    members: ProcessGroup,
    root: int,
    make: Callable[[], Sequence[Tensor]],
    async_op: bool,
) -> Any:
    """A part for each member, of any shape; a mistake of ``root`` is an error on all of them."""
    box: list[Any] = [None]
    parts: list[Tensor] = []
    if dist.get_rank() == root:
        try:
            parts = list_parts(operation, members, make())
            box = [(parts[0].dtype, [tuple(part.shape) for part in parts])]
        except CollectiveArgumentError as error:
            box = [error]
    run_collective(
        members,
        CollectiveCall(operation, root=root),
        lambda pg: dist.broadcast_object_list(box, root, group=pg),
    )
    if isinstance(box[0], CollectiveArgumentError):
        raise box[0]
    if not members.is_member:
        return None
    dtype, shapes = box[0]
    mine = shapes[members.rank()]
    longest = max(torch.Size(shape).numel() for shape in shapes)
    device = parts[0].device if parts else members.device
    padded = [torch.zeros(longest, dtype=dtype, device=device) for _ in parts]
    for room, part in zip(padded, parts, strict=True):
        room[: part.numel()] = part.reshape(-1)
    taken = torch.empty(longest, dtype=dtype, device=device)
    return run_collective(
        members,
        CollectiveCall.of(operation, [taken], root=root),
        lambda pg: dist.scatter(taken, padded or None, src=root, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: taken[: torch.Size(mine).numel()].view(mine),
    )


def all_to_all(output: Any, input: Any, group: Group = None, async_op: bool = False) -> Any:
    """``output[i]`` becomes member i's ``input[rank]``; sizes may differ, dtypes may not.

    Two lists of tensors, or two tensors that are cut into equal parts along their first dimension.
    """
    members = resolve(group)
    if isinstance(output, Tensor) and isinstance(input, Tensor):
        return all_to_all_single(output, input, group=group, async_op=async_op)
    outputs, inputs = list(output), list_parts("all_to_all", members, input)
    list_parts("all_to_all", members, outputs)
    # One flat tensor with the sizes of its parts: gloo's list form wants equal ones.
    given = torch.cat([tensor.reshape(-1) for tensor in inputs])
    takes, gives = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
    taken = given.new_empty(sum(takes))

    def finish() -> None:
        for room, part in zip(outputs, taken.split(takes), strict=True):
            room.copy_(part.view(room.shape))

    return run_collective(
        members,
        CollectiveCall("all_to_all", str(given.dtype), sends=tuple(gives), takes=tuple(takes)),
        lambda pg: dist.all_to_all_single(taken, given, takes, gives, group=pg, async_op=True),
        async_op=async_op,
        finish=finish,
    )


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """``all_to_all`` of the parts of one tensor along its first dimension; sizes count rows."""
    members = resolve(group)
    size = max(1, members.world_size())
    takes = list_splits("output", output, output_split_sizes, size)
    gives = list_splits("input", input, input_split_sizes, size)
    buffer, given = output.contiguous(), input.contiguous()
    return run_collective(
        members,
        CollectiveCall("all_to_all", str(input.dtype), sends=tuple(gives), takes=tuple(takes)),
        lambda pg: dist.all_to_all_single(buffer, given, takes, gives, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: write_back(output, buffer),
    )


# -- from one to one -------------------------------------------------------------------------------


def isend(tensor: Tensor, dst: int, group: Group = None, tag: int = 0) -> CollectiveWork | None:
    """Begins to send to one member, which calls ``recv`` or ``irecv``."""
    members = resolve(group)
    peer, given = find_peer(members, dst), tensor.contiguous()
    work: CollectiveWork | None = run_collective(
        members,
        CollectiveCall.of("send", [tensor]),
        lambda pg: dist.isend(given, peer, group=pg, tag=tag),
        async_op=True,
        compared=False,
    )
    if work is not None:
        work._kept = given
    return work


def irecv(
    tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0
) -> CollectiveWork | None:
    """Begins to receive from one member (None: from anyone) into ``tensor``."""
    members = resolve(group)
    peer = None if src is None else find_peer(members, src)
    buffer = tensor.contiguous()
    work: CollectiveWork | None = run_collective(
        members,
        CollectiveCall.of("recv", [tensor]),
        lambda pg: dist.irecv(buffer, peer, group=pg, tag=tag),
        async_op=True,
        finish=lambda: write_back(tensor, buffer),
        compared=False,
    )
    return work


def send(tensor: Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    """Sends to one member, which calls ``recv``."""
    work = isend(tensor, dst, group, tag)
    if work is not None:
        work.wait()


def recv(tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    """Receives from one member (None: from anyone) into ``tensor``; returns who sent it.

    -1 on a process outside of ``group``.
    """
    work = irecv(tensor, src, group, tag)
    if work is None:
        return -1
    work.wait()
    if src is not None:
        return src
    return resolve(group).ranks[work._works[0]._source_rank()]


def barrier(group: Group = None, async_op: bool = False) -> Any:
    """Returns once every member has called it."""
    members = resolve(group)
    # Without the device NCCL guesses it from the global rank.
    devices = [members.device.index] if members.backend == "nccl" else None
    return run_collective(
        members,
        CollectiveCall("barrier"),
        lambda pg: dist.barrier(pg, async_op=True, device_ids=devices),
        async_op=async_op,
    )


# -- the names of the NCCL guide -------------------------------------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])
_noted: set[str] = set()


def _for_nccl(function: _Function) -> _Function:
    """``function`` under its NCCL name: itself on NCCL, and on any other backend with one note."""

    @functools.wraps(function)
    def variant(*args: Any, **kwargs: Any) -> Any:
        backend = resolve().backend
        if backend != "nccl" and backend not in _noted:
            _noted.add(backend)
            log.info("nccl_%s and its like use %s here", function.__name__, backend)
        return function(*args, **kwargs)

    variant.__name__ = variant.__qualname__ = f"nccl_{function.__name__}"
    return variant  # type: ignore[return-value]


nccl_all_reduce = _for_nccl(all_reduce)
nccl_broadcast = _for_nccl(broadcast)
nccl_reduce = _for_nccl(reduce)
nccl_reduce_scatter = _for_nccl(reduce_scatter)
nccl_all_gather = _for_nccl(all_gather)
nccl_all_to_all = _for_nccl(all_to_all)
