"""A communicator over torch.distributed: nccl, gloo, mpi, or any backend registered with it."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm import watchdog
from torsh_trainer.comm.base import Communicator, Reduction, Work, check_mean
from torsh_trainer.comm.ending import abandon, destroy, settle
from torsh_trainer.comm.failures import CommunicationError
from torsh_trainer.comm.shared_memory import Parts, SharedMemory, SharesMemory
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError, TorshError

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
AVERAGING = ("nccl", "gloo", "mpi")
"""Backends that know AVG; for any other the mean is a sum, divided here."""

atexit.register(settle)

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")


def _collective(method: _Method) -> _Method:
    """Gives an error from the network the rank and the operation that it belongs to."""

    @functools.wraps(method)
    def run_named(self: TorchCommunicator, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (TorshError, torch.OutOfMemoryError):  # a plugin's backend has words of ours
            raise
        except RuntimeError as error:
            raise self._explain_failure(method.__name__, error) from error

    return run_named  # type: ignore[return-value]


class TorchCommunicator(Communicator):
    """The members of a torch.distributed process group.

    ``owned`` says that closing this communicator destroys the group; a group that the user made
    is left alone. ``timeout_s`` is the limit of parts that are split off, and serves the words of
    errors; the group itself has its own. ``values_group`` are the same members over gloo, for a
    backend that moves no memory of the host (NCCL): Python numbers go there, past the device.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        process_group: Any,
        *,
        timeout_s: float,
        owned: bool = True,
        whole: TorchCommunicator | None = None,
        values_group: Any = None,
    ) -> None:
        self.world = world
        self.device = device
        self.process_group = process_group
        self.backend = str(dist.get_backend(process_group)).lower()
        self._ranks = dist.get_process_group_ranks(process_group)
        self._timeout_s = timeout_s
        self._values_group = values_group or process_group
        on_host = moves_host_memory(self._values_group)
        self._values_device = torch.device("cpu") if on_host else device
        self._owned = owned
        self._whole = whole
        self._closed = False
        self._shared_memory = _memory_of(self)

    @property
    def shared_memory(self) -> SharedMemory | None:
        return self._shared_memory

    # -- tensors --------------------------------------------------------------------------------

    @_collective
    def all_reduce(
        self, tensor: Tensor, *, op: Reduction = "sum", async_op: bool = False
    ) -> Work | None:
        check_mean(tensor, op)
        buffer = tensor.contiguous()
        work = dist.all_reduce(buffer, self._op(op), group=self.process_group, async_op=async_op)
        return self._end_work(work, lambda: self._finish(tensor, buffer, op))

    @_collective
    def reduce(self, tensor: Tensor, *, dst: int, op: Reduction = "sum") -> None:
        check_mean(tensor, op)
        receives = self.rank == dst
        # gloo works in place on every member, so those who only give hand in a copy.
        buffer = tensor.contiguous() if receives else tensor.clone().contiguous()
        dist.reduce(buffer, self._global(dst), self._op(op), group=self.process_group)
        if receives:
            self._finish(tensor, buffer, op)

    @_collective
    def broadcast(self, tensor: Tensor, *, src: int = 0, async_op: bool = False) -> Work | None:
        buffer = tensor.contiguous()
        work = dist.broadcast(
            buffer, self._global(src), group=self.process_group, async_op=async_op
        )
        return self._end_work(work, lambda: _write_back(tensor, buffer))

    @_collective
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        buffer = tensor.contiguous()
        gathered = [torch.empty_like(buffer) for _ in self._ranks]
        dist.all_gather(gathered, buffer, group=self.process_group)
        return gathered

    @_collective
    def reduce_scatter(
        self, output: Tensor, tensors: Sequence[Tensor], *, op: Reduction = "sum"
    ) -> None:
        check_mean(output, op)
        buffer = output.contiguous()
        parts = [tensor.contiguous() for tensor in tensors]
        dist.reduce_scatter(buffer, parts, self._op(op), group=self.process_group)
        self._finish(output, buffer, op)

    @_collective
    def gather(self, tensor: Tensor, *, dst: int = 0) -> list[Tensor] | None:
        buffer = tensor.contiguous()
        receives = self.rank == dst
        gathered = [torch.empty_like(buffer) for _ in self._ranks] if receives else None
        dist.gather(buffer, gathered, dst=self._global(dst), group=self.process_group)
        return gathered

    @_collective
    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, *, src: int = 0) -> None:
        buffer = output.contiguous()
        parts = None if tensors is None else [tensor.contiguous() for tensor in tensors]
        dist.scatter(buffer, parts, src=self._global(src), group=self.process_group)
        _write_back(output, buffer)

    @_collective
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        # One flat tensor with split sizes: gloo's list form wants equal sizes, and is missing
        # from older releases of torch.
        given = torch.cat([tensor.reshape(-1) for tensor in inputs])
        taken = given.new_empty(sum(tensor.numel() for tensor in outputs))
        dist.all_to_all_single(
            taken,
            given,
            output_split_sizes=[tensor.numel() for tensor in outputs],
            input_split_sizes=[tensor.numel() for tensor in inputs],
            group=self.process_group,
        )
        parts = taken.split([tensor.numel() for tensor in outputs])
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part.view(output.shape))

    @_collective
    def send(self, tensor: Tensor, *, dst: int, async_op: bool = False) -> Work | None:
        buffer, to = tensor.contiguous(), self._other(dst)
        if not async_op:
            dist.send(buffer, to, group=self.process_group)
            return None
        work = dist.isend(buffer, to, group=self.process_group)
        return self._end_work(work, lambda: _write_back(buffer, buffer))  # which keeps the memory

    @_collective
    def recv(self, tensor: Tensor, *, src: int, async_op: bool = False) -> Work | None:
        buffer, giver = tensor.contiguous(), self._other(src)
        if not async_op:
            dist.recv(buffer, giver, group=self.process_group)
            _write_back(tensor, buffer)
            return None
        work = dist.irecv(buffer, giver, group=self.process_group)
        return self._end_work(work, lambda: _write_back(tensor, buffer))

    # -- Python numbers -------------------------------------------------------------------------

    def reduce_values(self, values: Sequence[float], *, op: Reduction = "sum") -> list[float]:
        if self.size == 1:
            return [float(value) for value in values]
        tensor, wait = self._begin_values(values, op)
        wait()
        return [float(value) for value in tensor.tolist()]

    def begin_sum(self, value: float) -> Callable[[], float]:
        if self.size == 1:
            return lambda: float(value)
        tensor, wait = self._begin_values([value], "sum")

        def total() -> float:
            wait()
            return float(tensor.item())

        return total

    @_collective
    def _begin_values(
        self, values: Sequence[float], op: Reduction
    ) -> tuple[Tensor, Callable[[], Any]]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._values_device)
        work = dist.all_reduce(tensor, self._op(op), group=self._values_group, async_op=True)
        return tensor, _Pending(self, work, lambda: self._finish(tensor, tensor, op)).wait

    # -- control --------------------------------------------------------------------------------

    @_collective
    def barrier(self) -> None:
        if self.backend == "nccl":  # without the device NCCL guesses it from the global rank
            dist.barrier(self.process_group, device_ids=[self.device.index])
        else:
            dist.barrier(self.process_group)

    @_collective
    def broadcast_object(self, value: Any, *, src: int = 0) -> Any:
        box = [value]
        dist.broadcast_object_list(box, self._global(src), group=self.process_group)
        return box[0]

    @_collective
    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        if self._whole is not None:
            raise ConfigError(
                "a part of a job's processes cannot be split again",
                fix="split the communicator of the whole job, with its ranks",
            )
        mine = tuple(sorted(self._global(rank) for rank in ranks))
        # torch makes a group only when every process takes part, so all of them walk through
        # the parts that any of them named, in one order.
        group = None
        limit = timedelta(seconds=self._timeout_s)  # torch's own default is half an hour
        for part in sorted(set(self.all_gather_object(mine))):
            made = dist.new_group(list(part), timeout=limit) if part else None
            group = made if part == mine else group
        return None if dist.get_rank() not in mine else self._part_of(group, owned=True)

    def duplicate(self) -> Communicator:
        if self._whole is None:
            return super().duplicate()
        same = self._whole.split(self._ranks)  # torch's number of a process is its rank there
        assert same is not None
        return same

    def part_of(self, process_group: Any) -> TorchCommunicator:
        return self._part_of(process_group, owned=False)

    def _part_of(self, process_group: Any, *, owned: bool) -> TorchCommunicator:
        world = world_of(process_group, node=self.world.node_rank, source=self.world.source)
        return TorchCommunicator(
            world,
            self.device,
            process_group,
            timeout_s=self._timeout_s,
            owned=owned,
            whole=self,
        )

    def close(self) -> None:
        self._leave(destroy)

    def abort(self) -> None:
        self._leave(destroy if self.size == 1 else abandon)

    def _leave(self, leave: Callable[[Any], None]) -> None:
        gone = self._closed or (self._whole is not None and self._whole._closed)
        self._closed = True
        if gone or not dist.is_initialized():
            return
        if self._owned:
            leave(self.process_group)
        elif self._values_group is not self.process_group:
            leave(self._values_group)

    # -- words and details ----------------------------------------------------------------------

    def _global(self, rank: int) -> int:
        """torch's number of a member; a part's members have other numbers among themselves."""
        if not 0 <= rank < len(self._ranks):
            raise ConfigError(
                f"rank {rank} is not one of this communicator's {len(self._ranks)} processes",
                fix=f"ranks go from 0 to {len(self._ranks) - 1}",
            )
        return self._ranks[rank]

    def _other(self, rank: int) -> int:
        if rank == self.rank:
            raise ConfigError(
                f"rank {rank} cannot exchange a tensor with itself", fix="name another rank"
            )
        return self._global(rank)

    def _op(self, op: Reduction) -> Any:
        return _OPS["sum" if op == "mean" and self.backend not in AVERAGING else op]

    def _finish(self, tensor: Tensor, buffer: Tensor, op: Reduction) -> None:
        if op == "mean" and self.backend not in AVERAGING:
            buffer.div_(self.size)
        _write_back(tensor, buffer)

    def _end_work(self, work: Any, finish: Callable[[], None]) -> Work | None:
        if work is not None:
            return _Pending(self, work, finish)
        finish()
        return None

    def _explain_failure(self, operation: str, error: RuntimeError) -> CommunicationError:
        if self.world.elastic:  # processes may be gone, the one with the store too: ask nobody
            rank = self.rank
            return CommunicationError(
                f"{operation} failed on rank {rank} ({self.backend}): {error}",
                fix="look for the rank that failed first, in its log",
                rank=rank,
                operation=operation,
            )
        longer = f"more than comm.timeout_s={self._timeout_s:g}"
        return watchdog.explain_failure(self.process_group, operation, error, longer=longer)


class _Pending:
    """A collective under way, and what is left to do when its result is there."""

    def __init__(self, comm: TorchCommunicator, work: Any, finish: Callable[[], None]) -> None:
        self._comm = comm
        self._work = work
        self._finish = finish

    def wait(self) -> bool:
        """Blocks until the tensors hold the result."""
        try:
            self._work.wait()
        except (TorshError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise self._comm._explain_failure("an asynchronous collective", error) from error
        self._finish()
        self._finish = _nothing
        return True


class _GroupMemory:
    """The memory that members of a process group share, with our words for its errors."""

    def __init__(self, comm: TorchCommunicator, memory: SharedMemory) -> None:
        self._comm = comm
        self._memory = memory

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._run("zeros", lambda: self._memory.zeros(count, dtype))

    def shares(self, count: int) -> bool:
        return self._run("shares", lambda: self._memory.shares(count))

    def make_stage(self, count: int, dtype: torch.dtype) -> None:
        self._run("make_stage", lambda: self._memory.make_stage(count, dtype))

    def parts(
        self, sizes: Sequence[int], dtype: torch.dtype, *, op: Literal["sum", "mean"] = "sum"
    ) -> Parts | None:
        return self._run("parts", lambda: self._memory.parts(sizes, dtype, op=op))

    def common(self, count: int, dtype: torch.dtype) -> Tensor | None:
        return self._run("common", lambda: self._memory.common(count, dtype))

    def _run(self, name: str, work: Callable[[], _Result]) -> _Result:
        try:
            return work()
        except (TorshError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise self._comm._explain_failure(name, error) from error


def _memory_of(comm: TorchCommunicator) -> SharedMemory | None:
    group = comm.process_group
    if comm.device.type != "cpu" or not isinstance(group, SharesMemory):
        return None
    return _GroupMemory(comm, group.shared_memory)


def moves_host_memory(process_group: Any) -> bool:
    """Whether a group takes tensors of the CPU; NCCL's takes none."""
    return torch.device("cpu") in process_group._device_types


def world_of(
    group: Any, *, node: int | str, source: str, rendezvous: Rendezvous | None = None
) -> World:
    """This process's place in ``group``; processes that give the same ``node`` share a host.

    Collective over the group.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    nodes: list[Any] = [None] * size
    dist.all_gather_object(nodes, node, group=group)
    order = list(dict.fromkeys(nodes))
    return World(
        rank=rank,
        size=size,
        local_rank=nodes[:rank].count(node),
        local_size=nodes.count(node),
        node_rank=order.index(node),
        nodes=len(order),
        rendezvous=rendezvous,
        source=source,
    )


def _write_back(tensor: Tensor, buffer: Tensor) -> None:
    if buffer is not tensor:
        tensor.copy_(buffer)


def _nothing() -> None:
    return None
