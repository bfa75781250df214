"""The process group: torch.distributed's collectives, over MPI."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ProcessGroup, Store, Work  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from torsh_mpi import endings
from torsh_mpi.agreement import Agreement, describe_call
from torsh_mpi.channel import Channel
from torsh_mpi.lane import Call, Lane
from torsh_mpi.memory import GroupMemory
from torsh_mpi.numbers import NATIVE, Reduction, check_reducible
from torsh_mpi.shared import RoomInterrupted
from torsh_mpi.staging import is_direct, put_back, readable, synchronise, writable
from torsh_mpi.watch import GroupStatus, WatchedGroup, watch
from torsh_mpi.work import Finished, MessageWork
from torsh_trainer.comm.failures import CollectiveArgumentError, CommunicationError

FLATTEN_BYTES = 1 << 22
"""Coalesced tensors that are no more than this together travel in one message."""
_FINISHED = Finished()
# Any: the stubs of torch's class have overloads that its own callers do not use.
_TorchGroup: Any = ProcessGroup

# What torch's callers pass when they say nothing.
_ALL_REDUCE = AllreduceOptions()
_ALL_REDUCE_COALESCED = AllreduceCoalescedOptions()
_REDUCE = ReduceOptions()
_REDUCE_SCATTER = ReduceScatterOptions()
_BROADCAST = BroadcastOptions()
_ALL_GATHER = AllgatherOptions()
_GATHER = GatherOptions()
_SCATTER = ScatterOptions()
_ALL_TO_ALL = AllToAllOptions()
_BARRIER = BarrierOptions()


class MpiGroup(_TorchGroup):
    """The members of ``comm``, numbered as MPI numbers them; ``ranks`` are torch's global ranks.

    Collectives run in the order of their calls: at once in the caller's thread where the caller
    waits and nothing is under way, else on the group's own thread. Tensors on a device are done
    with when a call returns.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        store: Store | None,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta,
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm = comm
        self._agreement = Agreement(comm, ranks)
        self._channel = Channel(comm, self._agreement)
        self._lane = Lane(f"mpi group {name}", self._explain)
        self.shared_memory = GroupMemory(self._lane, self._channel)
        self._status = GroupStatus(store, rank=comm.Get_rank(), ranks=ranks, name=name)
        self._store = store
        self._group_name = name
        self._group_description = "undefined"
        self._watched = WatchedGroup(
            self._lane,
            self._status,
            timeout_s=timeout.total_seconds(),
            interrupt=self._interrupt,
        )
        watch(self._watched)

    # -- reductions -----------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = _ALL_REDUCE) -> Work:
        (tensor,) = tensors
        reduction = Reduction.of(opts.reduceOp)
        if (
            (tensor.dtype, reduction.kind) in NATIVE
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not self._agreement.wanted
        ):  # the common case, without a detour
            if opts.asyncOp or not self._lane.enter("all_reduce"):
                call = Call("all_reduce", self._channel.all_reduce, (tensor, reduction), tensors)
                work = self._lane.submit(call)
                if not opts.asyncOp:
                    work.wait()
                return work
            try:
                self._channel.all_reduce(tensor, reduction)
            except MPI.Exception as error:
                raise self._lane.explain_failure("all_reduce", error) from error
            finally:
                self._lane.leave()
            return _FINISHED
        return self._all_reduce("all_reduce", tensors, reduction, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _ALL_REDUCE_COALESCED) -> Work:
        return self._all_reduce("all_reduce_coalesced", tensors, Reduction.of(opts.reduceOp), opts)

    def _all_reduce(
        self, name: str, tensors: list[Tensor], reduction: Reduction, opts: Any
    ) -> Work:
        for tensor in tensors:
            check_reducible(tensor.dtype, reduction.kind)

        def work() -> None:
            for together in _together(tensors):
                if len(together) == 1:
                    memory = _copy_in(together[0])
                    self._channel.all_reduce(memory, reduction)
                    put_back(together[0], memory)
                else:
                    flat = torch.cat([readable(t).view(-1) for t in together])
                    self._channel.all_reduce(flat, reduction)
                    for tensor, part in zip(
                        together, flat.split([t.numel() for t in together]), strict=True
                    ):
                        tensor.copy_(part.view(tensor.shape))

        return self._do(name, work, tensors, opts, says=(reduction.kind,))

    def reduce(self, tensors: list[Tensor], opts: Any = _REDUCE) -> Work:
        (tensor,) = tensors
        reduction = Reduction.of(opts.reduceOp)
        check_reducible(tensor.dtype, reduction.kind)
        root = opts.rootRank

        def work() -> None:
            memory = _copy_in(tensor)
            self._channel.reduce(memory, root, reduction)
            if self.rank() == root:
                put_back(tensor, memory)

        return self._do("reduce", work, tensors, opts, says=(reduction.kind, "to", root))

    def reduce_scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: Any = _REDUCE_SCATTER,
    ) -> Work:
        ((output,), (parts,)) = outputs, inputs
        reduction = Reduction.of(opts.reduceOp)
        check_reducible(output.dtype, reduction.kind)
        counts = self._counts(parts, "reduce_scatter", mine=output)

        def work() -> None:
            flat = torch.cat([readable(part).view(-1) for part in parts])
            memory = writable(output)
            if len(set(counts)) == 1:
                self._channel.reduce_scatter(memory, flat, reduction)
            else:
                self._channel.reduce_scatter_uneven(memory, flat, counts, reduction)
            put_back(output, memory)

        return self._do(
            "reduce_scatter", work, outputs, opts, says=(reduction.kind, counts), sized=False
        )

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: Any = _REDUCE_SCATTER
    ) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _REDUCE_SCATTER
    ) -> Work:
        reduction = Reduction.of(opts.reduceOp)
        for output, tensor in zip(outputs, inputs, strict=True):
            check_reducible(output.dtype, reduction.kind)
            self._check_times("reduce_scatter", whole=tensor, part=output)

        def work() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                memory = writable(output)
                self._channel.reduce_scatter(memory, readable(tensor), reduction)
                put_back(output, memory)

        return self._do("reduce_scatter_single", work, outputs, opts, says=(reduction.kind,))

    # -- moving ---------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any = _BROADCAST) -> Work:
        root = opts.rootRank

        def work() -> None:
            for tensor in tensors:
                memory = _copy_in(tensor) if self.rank() == root else writable(tensor)
                self._channel.broadcast(memory, root)
                if self.rank() != root:
                    put_back(tensor, memory)

        return self._do("broadcast", work, tensors, opts, says=("from", root))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _ALL_GATHER
    ) -> Work:
        return self._all_gather("all_gather", outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _ALL_GATHER
    ) -> Work:
        return self._all_gather("all_gather_coalesced", outputs, inputs, opts)

    def _all_gather(
        self, name: str, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> Work:
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._counts(parts, name, mine=tensor)

        def work() -> None:
            for parts, tensor in zip(outputs, inputs, strict=True):
                self._gather_all(parts, readable(tensor))

        gives, takes = None, None
        if len(outputs) == 1:
            gives = [inputs[0].numel()] * self.size()
            takes = [part.numel() for part in outputs[0]]
        produced = [part for parts in outputs for part in parts]
        return self._do(name, work, produced, opts, says=(), sized=False, gives=gives, takes=takes)

    def _gather_all(self, parts: list[Tensor], mine: Tensor) -> None:
        if len({part.numel() for part in parts}) == 1:
            flat = mine.new_empty(len(parts), mine.numel())
            self._channel.all_gather(flat, mine)
            for part, row in zip(parts, flat.unbind(), strict=True):
                part.copy_(row.view(part.shape))
            return
        for member, part in enumerate(parts):
            memory = mine if member == self.rank() else writable(part)
            self._channel.broadcast(memory, member)
            put_back(part, memory)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = _ALL_GATHER) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALL_GATHER
    ) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_times("all_gather", whole=output, part=tensor)

        def work() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                memory = writable(output)
                self._channel.all_gather(memory, readable(_apart(tensor, memory)))
                put_back(output, memory)

        return self._do("all_gather_single", work, outputs, opts)

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _GATHER
    ) -> Work:
        (tensor,) = inputs
        root = opts.rootRank
        parts = outputs[0] if outputs else []
        if self.rank() == root:
            self._counts(parts, "gather", mine=tensor)

        def work() -> None:
            memories = [writable(part) for part in parts]
            self._channel.gather(memories, readable(tensor), root)
            for part, memory in zip(parts, memories, strict=True):
                put_back(part, memory)

        gives = [tensor.numel() if member == root else 0 for member in range(self.size())]
        takes = [part.numel() for part in parts] or [0] * self.size()
        return self._do(
            "gather",
            work,
            parts or inputs,
            opts,
            says=("to", root),
            sized=False,
            gives=gives,
            takes=takes,
        )

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _SCATTER
    ) -> Work:
        (output,) = outputs
        root = opts.rootRank
        parts = inputs[0] if inputs else []
        if self.rank() == root:
            self._counts(parts, "scatter", mine=output)

        def work() -> None:
            memory = writable(output)
            self._channel.scatter(memory, [readable(part) for part in parts], root)
            put_back(output, memory)

        takes = [output.numel() if member == root else 0 for member in range(self.size())]
        gives = [part.numel() for part in parts] or [0] * self.size()
        return self._do(
            "scatter",
            work,
            outputs,
            opts,
            says=("from", root),
            sized=False,
            gives=gives,
            takes=takes,
        )

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = _ALL_TO_ALL,
    ) -> Work:
        takes = self._elements(output, output_splits)
        gives = self._elements(tensor, input_splits)

        def work() -> None:
            memory = writable(output)
            if output_splits or input_splits:
                self._channel.all_to_all_uneven(memory, readable(tensor), takes, gives)
            else:
                self._channel.all_to_all(memory, readable(tensor))
            put_back(output, memory)

        return self._do(
            "all_to_all_single", work, [output], opts, sized=False, gives=gives, takes=takes
        )

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALL_TO_ALL
    ) -> Work:
        takes, gives = ([part.numel() for part in parts] for parts in (outputs, inputs))
        if not len(takes) == len(gives) == self.size():
            raise CollectiveArgumentError(
                f"all_to_all takes {self.size()} tensors and gives {self.size()}, one for each "
                f"rank; here are {len(takes)} and {len(gives)}",
                fix="pass one tensor for every rank of the group",
            )

        def work() -> None:
            flat = torch.cat([readable(part).view(-1) for part in inputs])
            memory = flat.new_empty(sum(takes))
            self._channel.all_to_all_uneven(memory, flat, takes, gives)
            for part, piece in zip(outputs, memory.split(takes), strict=True):
                part.copy_(piece.view(part.shape))

        return self._do("all_to_all", work, outputs, opts, sized=False, gives=gives, takes=takes)

    def barrier(self, opts: Any = _BARRIER) -> Work:
        return self._do("barrier", self._channel.barrier, [], opts)

    # Names that torch before 2.13 calls, and some of its code still does.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- one to one -----------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        (tensor,) = tensors
        memory = readable(tensor)
        synchronise(memory)
        return self._message("send", self._channel.isend(memory, to, tag), memory, _nothing)

    def recv(self, tensors: list[Tensor], source: int | None, tag: int) -> Work:
        (tensor,) = tensors
        memory = writable(tensor)
        synchronise(memory)
        request = self._channel.irecv(memory, source, tag)
        return self._message("recv", request, memory, lambda: put_back(tensor, memory))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self.recv(tensors, None, tag)

    def _message(
        self, name: str, request: MPI.Request, memory: Tensor, finish: Callable[[], None]
    ) -> Work:
        def late(limit_s: float) -> CommunicationError:
            return CommunicationError(
                f"{name} did not finish within {limit_s:g} s on rank {self._global_rank()}: the "
                "other rank did not take part",
                fix="see the log of that rank; comm.timeout_s gives more time",
                rank=self._global_rank(),
                operation=name,
            )

        return MessageWork(
            request,
            memory,
            timeout_s=self._watched.timeout_s,
            finish=finish,
            failed=lambda error: self._explain(name, error),
            late=late,
        )

    # -- the group itself -----------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """What torch calls this backend."""
        return "mpi"

    name = getBackendName

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """torch keeps the name in a backend of its own, and there is none here."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """As ``setGroupName`` was told."""
        return self._group_name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        """As ``setGroupName``."""
        self._group_description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """As ``setGroupDesc`` was told."""
        return self._group_description

    @property
    def _device_types(self) -> list[torch.device]:
        """Object collectives take the first: their bytes are in the host's memory anyway."""
        return [torch.device("cpu")]

    def get_group_store(self) -> Store | None:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._watched.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leaves the group. Not collective: MPI keeps the communicator until the process ends."""
        self._lane.close()
        if sys.exc_info()[0] is not None:  # called while an error is on its way out
            endings.broke()

    def abort(self) -> None:
        """Breaks off whatever this process waits for in the group."""
        self._lane.fail(
            CommunicationError(
                "the group was aborted", fix="make a new one", rank=self._global_rank()
            )
        )
        self._interrupt()

    # -- how it is done -------------------------------------------------------------------------

    def _do(
        self,
        name: str,
        work: Callable[[], None],
        tensors: Sequence[Tensor],
        opts: Any,
        *,
        says: Sequence[object] = (),
        sized: bool = True,
        gives: Sequence[int] | None = None,
        takes: Sequence[int] | None = None,
    ) -> Work:
        """Runs ``work`` in its turn; ``tensors`` are what it leaves behind.

        ``says``, and the tensors' dtypes and (with ``sized``) sizes, are the same on every rank
        when the ranks agree; ``gives`` and ``takes`` are what travels where sizes may differ.
        """

        def check_and_work() -> None:
            if self._agreement.wanted:
                words = [describe_call(name, t, *says, sized=sized) for t in tensors or (None,)]
                if not sized:
                    words = words[:1]
                self._agreement.check("; ".join(words), gives=gives or (), takes=takes or ())
            work()

        call = Call(name, check_and_work, (), tensors)
        if all(map(is_direct, tensors)):
            if opts.asyncOp:
                return self._lane.submit(call)
            self._lane.run(call)
            return _FINISHED
        # On a device, order is that of its stream: what runs in the caller's thread is in it.
        for tensor in tensors:
            synchronise(tensor)
        self._lane.run(call)
        return Finished(tensors)

    def _counts(self, parts: Sequence[Tensor], name: str, *, mine: Tensor) -> list[int]:
        """How many elements each member has part in.

        Raises:
            CollectiveArgumentError: there is not one part for each member, of one dtype.
        """
        if len(parts) != self.size():
            raise CollectiveArgumentError(
                f"{name} takes a list of {self.size()} tensors, one for each rank; "
                f"here are {len(parts)}",
                fix="pass one tensor for every rank of the group",
            )
        for part in parts:
            if part.dtype != mine.dtype:
                raise CollectiveArgumentError(
                    f"{name} was given {mine.dtype} and {part.dtype} tensors together",
                    fix="convert them to one dtype",
                )
        if parts[self.rank()].numel() != mine.numel():
            raise CollectiveArgumentError(
                f"{name}: this rank's own part has {parts[self.rank()].numel()} elements, and its "
                f"tensor has {mine.numel()}",
                fix="make the list's entry for this rank as large as the tensor",
            )
        return [part.numel() for part in parts]

    def _check_times(self, name: str, *, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise CollectiveArgumentError(
                f"{name}: {whole.numel()} {whole.dtype} elements are not {self.size()} times "
                f"{part.numel()} {part.dtype} elements",
                fix="the larger tensor holds one part for every rank of the group",
            )

    def _elements(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Elements for each member, of ``splits`` along the first dimension."""
        if not splits:
            count, rest = divmod(tensor.size(0) if tensor.dim() else 0, self.size())
            splits, fits = [count] * self.size(), rest == 0
        else:
            fits = len(splits) == self.size() and sum(splits) == tensor.size(0)
        if not fits:
            raise CollectiveArgumentError(
                f"all_to_all_single: a first dimension of {tensor.size(0)} cannot be split into "
                f"{list(splits)} for {self.size()} ranks",
                fix="give one size for every rank, which add up to the first dimension",
            )
        row = tensor[0].numel() if tensor.size(0) else 0
        return [count * row for count in splits]

    def _global_rank(self) -> int:
        return self._status.global_rank

    def _explain(self, name: str, error: Exception) -> Exception:
        """Our error for one of MPI's."""
        endings.broke()
        text = str(error)
        if isinstance(error, RoomInterrupted) or "REVOKED" in text:
            verdict = self._status.verdict()
            if verdict is not None:
                return verdict
            reason = "another rank broke it off"
        elif "TRUNCATE" in text:
            reason = "another rank passed a tensor of another size or dtype"
        else:
            reason = text
        return CommunicationError(
            f"{name} failed on rank {self._global_rank()}: {reason}",
            fix="TORCH_DISTRIBUTED_DEBUG=DETAIL compares what the ranks do before each collective",
            rank=self._global_rank(),
            operation=name,
        )

    def _interrupt(self) -> bool:
        ended = self._channel.break_off()
        if endings.can_revoke():
            self._comm.Revoke()
            return True
        return ended


def _together(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in messages: small ones of one dtype and device share one."""
    groups: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        last = groups[-1][0] if groups else None
        if (
            last is not None
            and (last.dtype, last.device) == (tensor.dtype, tensor.device)
            and size + tensor.nbytes <= FLATTEN_BYTES
        ):
            groups[-1].append(tensor)
            size += tensor.nbytes
        else:
            groups.append([tensor])
            size = tensor.nbytes
    return groups


def _copy_in(tensor: Tensor) -> Tensor:
    """Memory that holds ``tensor`` and may be written: the tensor itself where MPI can take it."""
    memory = writable(tensor)
    if memory is not tensor:
        memory.copy_(tensor)
    return memory


def _apart(tensor: Tensor, memory: Tensor) -> Tensor:
    """``tensor``, or a copy where it lies inside ``memory`` (FSDP gathers in place)."""
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    return tensor.clone() if begin <= tensor.data_ptr() < end and memory.nbytes else tensor


def _nothing() -> None:
    return None
