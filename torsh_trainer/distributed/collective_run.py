"""How a collective is begun and ended, and its arguments are checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm.failures import BackendError, CollectiveArgumentError
from torsh_trainer.comm.torch import AVERAGING
from torsh_trainer.distributed import checking
from torsh_trainer.distributed.checking import CollectiveCall
from torsh_trainer.distributed.process_group import ProcessGroup, ReduceOp
from torsh_trainer.errors import TorshError

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


def run_collective(
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


def split_average(members: ProcessGroup, op: Any) -> tuple[Any, int]:
    """What the backend is asked for, and by what the result is divided here."""
    if op == ReduceOp.AVG and members.backend not in AVERAGING:
        return ReduceOp.SUM, max(1, members.world_size())
    return op, 1


def find_root(
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


def find_peer(members: ProcessGroup, rank: int) -> int:
    """torch's number of the member that a tensor is exchanged with."""
    if rank == dist.get_rank():
        raise CollectiveArgumentError(
            f"rank {rank} cannot exchange a tensor with itself", fix="name another rank"
        )
    return find_root(members, rank, None, "rank")


def _no_such(words: str, members: ProcessGroup) -> CollectiveArgumentError:
    return CollectiveArgumentError(
        f"{words} is not one of this group's ranks", fix=f"they are {members.ranks}"
    )


def list_parts(operation: str, members: ProcessGroup, tensors: Any) -> list[Tensor]:
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


def list_splits(name: str, tensor: Tensor, sizes: Sequence[int] | None, members: int) -> list[int]:
    """Rows of each part: ``sizes``, or equal ones."""
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


def write_back(tensor: Tensor, buffer: Tensor, divisor: int = 1) -> None:
    """Divides the result in ``buffer``, and brings it into ``tensor``."""
    if divisor != 1:
        buffer.div_(divisor)
    if buffer is not tensor:
        tensor.copy_(buffer)


def write_all(tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """``write_back`` of each."""
    for tensor, buffer in zip(tensors, buffers, strict=True):
        write_back(tensor, buffer)


def return_value(work: CollectiveWork | None, value: Any) -> CollectiveWork | None:
    """``work`` whose result is ``value``; None on a process that takes no part."""
    if work is not None:
        first = work._finish
        work._finish = lambda: (first() if first else None, value)[1]
    return work
