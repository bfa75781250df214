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
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm.failures import BackendError, CollectiveArgumentError
from torsh_trainer.comm.torch import AVERAGING
from torsh_trainer.distributed import checking
from torsh_trainer.distributed.checking import CollectiveCall
from torsh_trainer.distributed.process_group import Group, ProcessGroup, ReduceOp, resolve
from torsh_trainer.errors import TorshError

log = logging.getLogger(__name__)

_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.AVG,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}

Op = Any
"""A ``ReduceOp``, torch's own, or its name in lower case."""


class CollectiveWork:
    """An operation under way."""

    def __init__(
        self,
        group: ProcessGroup,
        call: CollectiveCall,
        works: Sequence[Any],
        finish: Callable[[], Any] | None = None,
    ) -> None:
        self._group = group
        self._call = call
        self._works = tuple(work for work in works if work is not None)
        self._finish = finish
        self._kept: Any = None  # what must live until the operation has ended
        self._result: Any = True
        self._done = False

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """Blocks until the result is there, and returns it; True where it is in the tensors."""
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        try:
            for work in self._works:
                work.wait() if limit is None else work.wait(limit)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise _explain_failure(self._group, self._call, error) from error
        return self._end()

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> Any:
        """As ``wait``."""
        return self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the same result."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self._end())

    def _end(self) -> Any:
        if not self._done:
            self._done = True
            if self._finish is not None:
                value = self._finish()
                self._result = True if value is None else value
        return self._result


def _run(
    group: ProcessGroup,
    call: CollectiveCall,
    begin: Callable[[Any], Any],
    *,
    async_op: bool = False,
    finish: Callable[[], Any] | None = None,
    compared: bool = True,
) -> Any:
    """Begins an operation with torch's group; ends it, or returns it as work under way.

    ``finish`` makes the result once the tensors are there.
    """
    if not group.is_member:
        warnings.warn(
            f"{call.operation}: this process is not a member of the group, and does nothing",
            stacklevel=3,
        )
        return None
    if compared:
        checking.before(group, call, waits=not async_op)
    try:
        begun = begin(group.process_group)
    except (TorshError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise _explain_failure(group, call, error) from error
    works = begun if isinstance(begun, list) else [begun]
    work = CollectiveWork(group, call, works, finish)
    if async_op:
        return work
    result = work.wait()
    return None if result is True else result


_REFUSALS = ("support", "cannot use reduceop", "not implemented", "invalid scalar type")
"""In the words of backends for what they cannot do, whatever the other ranks do."""


def _explain_failure(group: ProcessGroup, call: CollectiveCall, error: RuntimeError) -> TorshError:
    words = str(error).strip()
    if not any(refusal in words.lower() for refusal in _REFUSALS):
        return checking.explain_failure(group, call.operation, error)
    return BackendError(
        f"{group.backend} cannot do {call.words()}: {words.splitlines()[0]}",
        fix="convert the tensor, choose another operation, or another backend",
        operation=call.operation,
    )


# -- reductions ------------------------------------------------------------------------------------


def all_reduce(
    tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduces ``tensor`` over all members, in place."""
    members = resolve(group)
    operation = reduction(op, tensor)
    buffer = tensor.contiguous()
    theirs, divisor = _split_average(members, operation)
    return _run(
        members,
        CollectiveCall.of("all_reduce", [tensor], op=operation),
        lambda pg: dist.all_reduce(buffer, theirs, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: _write_back(tensor, buffer, divisor),
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
    root = _root(members, dst, group_dst, "dst")
    takes = dist.get_rank() == root
    # gloo works in place on every member, so those who only give hand in a copy.
    buffer = tensor.contiguous() if takes else tensor.clone().contiguous()
    theirs, divisor = _split_average(members, operation)
    return _run(
        members,
        CollectiveCall.of("reduce", [tensor], op=operation, root=root),
        lambda pg: dist.reduce(buffer, root, theirs, group=pg, async_op=True),
        async_op=async_op,
        finish=(lambda: _write_back(tensor, buffer, divisor)) if takes else None,
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
    parts = _parts("reduce_scatter", members, input)
    buffer = output.contiguous()
    theirs, divisor = _split_average(members, operation)
    return _run(
        members,
        CollectiveCall.of("reduce_scatter", parts, op=operation),
        lambda pg: dist.reduce_scatter(buffer, parts, theirs, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: _write_back(output, buffer, divisor),
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
    theirs, divisor = _split_average(members, operation)
    return _run(
        members,
        CollectiveCall.of("reduce_scatter", [input], op=operation),
        lambda pg: dist.reduce_scatter_single(
            buffer.view(-1), given.view(-1), theirs, group=pg, async_op=True
        ),
        async_op=async_op,
        finish=lambda: _write_back(output, buffer, divisor),
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
    return _returning(work, chunk) if async_op or not members.is_member else chunk


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
    root = _root(members, src, group_src, "src")
    buffer = tensor.contiguous()
    return _run(
        members,
        CollectiveCall.of("broadcast", [tensor], root=root),
        lambda pg: dist.broadcast(buffer, root, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: _write_back(tensor, buffer),
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
    buffers = _parts("all_gather", members, output)
    return _run(
        members,
        CollectiveCall.of("all_gather", [tensor]),
        lambda pg: dist.all_gather(buffers, mine, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: _write_all(output, buffers),
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
    return _run(
        members,
        CollectiveCall.of("all_gather", [tensor]),
        lambda pg: dist.all_gather_single(buffer.view(-1), mine.view(-1), group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: _write_back(output, buffer),
    )


def _all_gathered(tensor: Tensor, members: ProcessGroup, async_op: bool, concat: bool) -> Any:
    size = max(1, members.world_size())
    whole = tensor.new_empty((size, *tensor.shape))
    work = all_gather_into_tensor(whole, tensor, members, async_op=async_op)
    joined = whole.flatten(0, 1) if tensor.dim() else whole
    value = joined if concat else list(whole)
    return _returning(work, value) if async_op or not members.is_member else value


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
    root = _root(members, dst, group_dst, "dst", default=0)
    takes = dist.get_rank() == root
    mine = tensor.contiguous()
    given = gather_list if takes and gather_list is not None else None
    buffers: list[Tensor] | None = None
    if takes:
        room = [torch.empty_like(mine) for _ in members.ranks] if given is None else given
        buffers = _parts("gather", members, room)

    def finish() -> list[Tensor] | None:
        if given is not None and buffers is not None:
            _write_all(given, buffers)
            return None
        return buffers

    return _run(
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
        root = _root(members, scatter_list, None, "src")
        whole = tensor if dist.get_rank() == root else None
        return _hand_out("scatter", members, root, lambda: _cut(whole, members), async_op)
    root = _root(members, src, group_src, "src", default=0)
    gives = dist.get_rank() == root
    if tensor is None:
        return _hand_out("scatter", members, root, lambda: scatter_list, async_op)
    parts = _parts("scatter", members, scatter_list) if gives else None
    buffer = tensor.contiguous()
    for part in parts or ():
        if part.numel() != buffer.numel():
            raise CollectiveArgumentError(
                f"scatter_list holds {[list(part.shape) for part in parts or ()]}, and the output "
                f"has shape {list(tensor.shape)}",
                fix="parts of different sizes go with scatter(None, scatter_list, src)",
            )
    return _run(
        members,
        CollectiveCall.of("scatter", [tensor], root=root),
        lambda pg: dist.scatter(buffer, parts, src=root, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: _write_back(tensor, buffer),
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
            parts = _parts(operation, members, make())
            box = [(parts[0].dtype, [tuple(part.shape) for part in parts])]
        except CollectiveArgumentError as error:
            box = [error]
    _run(
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
    return _run(
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
    outputs, inputs = list(output), _parts("all_to_all", members, input)
    _parts("all_to_all", members, outputs)
    # One flat tensor with the sizes of its parts: gloo's list form wants equal ones.
    given = torch.cat([tensor.reshape(-1) for tensor in inputs])
    takes, gives = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
    taken = given.new_empty(sum(takes))

    def finish() -> None:
        for room, part in zip(outputs, taken.split(takes), strict=True):
            room.copy_(part.view(room.shape))

    return _run(
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
    takes = _splits("output", output, output_split_sizes, size)
    gives = _splits("input", input, input_split_sizes, size)
    buffer, given = output.contiguous(), input.contiguous()
    return _run(
        members,
        CollectiveCall("all_to_all", str(input.dtype), sends=tuple(gives), takes=tuple(takes)),
        lambda pg: dist.all_to_all_single(buffer, given, takes, gives, group=pg, async_op=True),
        async_op=async_op,
        finish=lambda: _write_back(output, buffer),
    )


# -- from one to one -------------------------------------------------------------------------------


def isend(tensor: Tensor, dst: int, group: Group = None, tag: int = 0) -> CollectiveWork | None:
    """Begins to send to one member, which calls ``recv`` or ``irecv``."""
    members = resolve(group)
    peer, given = _peer(members, dst), tensor.contiguous()
    work: CollectiveWork | None = _run(
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
    peer = None if src is None else _peer(members, src)
    buffer = tensor.contiguous()
    work: CollectiveWork | None = _run(
        members,
        CollectiveCall.of("recv", [tensor]),
        lambda pg: dist.irecv(buffer, peer, group=pg, tag=tag),
        async_op=True,
        finish=lambda: _write_back(tensor, buffer),
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
    return _run(
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


# -- details ---------------------------------------------------------------------------------------


def reduction(op: Op, tensor: Tensor) -> Any:
    """torch's operation.

    Raises:
        CollectiveArgumentError: nothing is called so, or it is the mean of integers.
    """
    if isinstance(op, str):
        if op.lower() not in _OPS:
            raise CollectiveArgumentError(
                f"op={op!r} is unknown", fix=f"choose one of {', '.join(_OPS)}"
            )
        op = _OPS[op.lower()]
    whole_numbers = not (tensor.is_floating_point() or tensor.is_complex())
    if whole_numbers and op == ReduceOp.AVG:
        raise CollectiveArgumentError(
            f"the mean of {tensor.dtype} values is not of that dtype",
            fix="reduce with ReduceOp.SUM and divide, or convert to floating point first",
        )
    return op


def _split_average(members: ProcessGroup, op: Any) -> tuple[Any, int]:
    """What the backend is asked for, and by what the result is divided here."""
    if op == ReduceOp.AVG and members.backend not in AVERAGING:
        return ReduceOp.SUM, max(1, members.world_size())
    return op, 1


def _root(
    members: ProcessGroup,
    rank: Any,
    in_group: int | None,
    name: str,
    *,
    default: int | None = None,
) -> int:
    """torch's number of the member that gives or takes everything."""
    if in_group is not None and members.is_member:
        if not 0 <= in_group < len(members.ranks):
            raise _no_such(f"group_{name}={in_group}", members)
        rank = members.ranks[in_group]
    if rank is None:
        rank = default
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise CollectiveArgumentError(f"{name}={rank!r} is no rank", fix="pass a whole number")
    if members.is_member and rank not in members.ranks:
        raise _no_such(f"{name}={rank}", members)
    return int(rank)


def _peer(members: ProcessGroup, rank: int) -> int:
    if rank == dist.get_rank():
        raise CollectiveArgumentError(
            f"rank {rank} cannot exchange a tensor with itself", fix="name another rank"
        )
    return _root(members, rank, None, "rank")


def _no_such(words: str, members: ProcessGroup) -> CollectiveArgumentError:
    return CollectiveArgumentError(
        f"{words} is not one of this group's ranks", fix=f"they are {members.ranks}"
    )


def _parts(operation: str, members: ProcessGroup, tensors: Any) -> list[Tensor]:
    """``tensors`` as contiguous ones, one for each member.

    Raises:
        CollectiveArgumentError: there are more or fewer, or something else among them.
    """
    parts = list(tensors) if isinstance(tensors, Sequence) else []
    expected = len(members.ranks)
    if members.is_member and len(parts) != expected:
        given = f"{len(parts)} tensors" if parts else type(tensors).__name__
        raise CollectiveArgumentError(
            f"{operation} among {expected} members got {given}",
            fix="pass a list with one tensor for each member",
        )
    for part in parts:
        if not isinstance(part, Tensor) or part.dtype != parts[0].dtype:
            kind = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise CollectiveArgumentError(
                f"{operation} got a list with {kind} in it", fix="pass tensors of one dtype"
            )
    return [part.contiguous() for part in parts]


def _splits(name: str, tensor: Tensor, sizes: Sequence[int] | None, members: int) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if sizes is not None:
        if len(sizes) != members or sum(sizes) != rows:
            raise CollectiveArgumentError(
                f"{name}_split_sizes={list(sizes)} for {rows} rows and {members} members",
                fix="give one size for each member; together they are the first dimension",
            )
        return list(sizes)
    if rows % members:
        raise CollectiveArgumentError(
            f"all_to_all cannot cut {rows} rows into {members} equal parts",
            fix=f"give {name}_split_sizes, or pass lists of tensors",
        )
    return [rows // members] * members


def _write_back(tensor: Tensor, buffer: Tensor, divisor: int = 1) -> None:
    if divisor != 1:
        buffer.div_(divisor)
    if buffer is not tensor:
        tensor.copy_(buffer)


def _write_all(tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    for tensor, buffer in zip(tensors, buffers, strict=True):
        _write_back(tensor, buffer)


def _returning(work: CollectiveWork | None, value: Any) -> CollectiveWork | None:
    """``work`` whose result is ``value``; None on a process that takes no part."""
    if work is not None:
        first = work._finish
        work._finish = lambda: (first() if first else None, value)[1]
    return work
