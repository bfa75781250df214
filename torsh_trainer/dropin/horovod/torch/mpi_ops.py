"""Collectives with Horovod's names, signatures and answers."""

from __future__ import annotations

import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.dropin.horovod.common.exceptions import HorovodInternalError
from torsh_trainer.dropin.horovod.common.process_sets import (
    DYNAMIC,
    ProcessSet,
    add_process_set,
    global_process_set,
    register_all,
    remove_process_set,
)
from torsh_trainer.dropin.horovod.torch.compression import Compression
from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.negotiation.engine import describe
from torsh_trainer.dropin.negotiation.operations import Collective
from torsh_trainer.dropin.negotiation.requests import (
    ADASUM,
    AVERAGE,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Request,
)
from torsh_trainer.dropin.session import session
from torsh_trainer.errors import Unsupported

__all__ = [
    "HorovodInternalError",
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "remove_process_set",
]
__getattr__ = refuse_unknown(__name__)

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT

_MOVED = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
}
_REDUCED = _MOVED - {torch.uint8, torch.int8, torch.int16}
_numbers = itertools.count(1)
_unnamed: Counter[tuple[str, int]] = Counter()
_handles: dict[int, Collective] = {}


# -- on and off, who am I --------------------------------------------------------------------------


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meets the other processes; a second call does nothing.

    Raises:
        ValueError: ``comm`` names some ranks only, or a process set is wrong.
    """
    if comm is not None and not isinstance(comm, list | tuple):
        raise ValueError(
            "hvd.init(comm) with a communicator of mpi4py is not there under drop-in; leave comm "
            "out, and name ranks with process_sets"
        )
    if is_initialized():
        return
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets={process_sets!r} is neither 'dynamic' nor a list")
        os.environ[DYNAMIC] = "1"
        process_sets = None
    session.start()
    _handles.clear()
    _unnamed.clear()
    if comm and sorted(comm) != list(range(size())):
        session.stop()
        raise ValueError(
            f"hvd.init({list(comm)}) leaves ranks out, which drop-in does not do; use process_sets"
        )
    register_all(list(process_sets or ()))


def shutdown() -> None:
    """Leaves the other processes; what they still wait for ends in an error."""
    _handles.clear()
    session.stop()


def is_initialized() -> bool:
    """Between ``init`` and ``shutdown``."""
    return session.is_on


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Refused: there is no timeline.

    Raises:
        Unsupported: always.
    """
    raise Unsupported(
        "hvd.start_timeline is not there under drop-in",
        fix="leave it out: torch.profiler writes the same format",
    )


def stop_timeline() -> None:
    """Does nothing: none was started."""
    session.check_on()


def rank() -> int:
    """This process's number."""
    return session.comm.world.rank


def size() -> int:
    """How many processes there are."""
    return session.comm.world.size


def local_rank() -> int:
    """This process's number on its host."""
    return session.comm.world.local_rank


def local_size() -> int:
    """How many processes this host has."""
    return session.comm.world.local_size


def cross_rank() -> int:
    """The number of this process's host."""
    return session.comm.world.node_rank


def cross_size() -> int:
    """How many hosts there are."""
    return session.comm.world.nodes


def is_homogeneous() -> bool:
    """True: every host of a job of ours has as many processes."""
    session.check_on()
    return True


def mpi_built() -> bool:
    """Whether the job communicates by MPI."""
    return session.is_on and session.comm.backend == "mpi"


def mpi_enabled() -> bool:
    """As ``mpi_built``."""
    return mpi_built()


def mpi_threads_supported() -> bool:
    """False; refused where the job does not communicate by MPI.

    Raises:
        ValueError: it does not.
    """
    if not mpi_built():
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")
    return False


def gloo_built() -> bool:
    """True: numbers of the host can always travel by gloo."""
    return True


def gloo_enabled() -> bool:
    """As ``gloo_built``."""
    return True


def nccl_built() -> int:
    """NCCL's version where the job communicates by it, else 0."""
    if not session.is_on or session.comm.backend != "nccl":
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Whether torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch has ROCm."""
    return getattr(torch.version, "hip", None) is not None


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


# -- handles ---------------------------------------------------------------------------------------


def begin(
    kind: str,
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    name: str | None,
    process_set: ProcessSet,
    single: bool = True,
    at_once: bool = False,
    **facts: Any,
) -> int:
    """Asks for a collective; ``facts`` are further fields of its ``Request``.

    Raises:
        ValueError: a tensor is of a wrong type or layout, or its name is in use.
    """
    for tensor in tensors:
        _check(kind, tensor)
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not known: give it to hvd.init or add_process_set")
    if not process_set.included():
        raise ValueError("Process is not part of provided process set.")
    if name is None:
        counted = kind, process_set.process_set_id
        _unnamed[counted] += 1
        name = f"{kind}.noname.{_unnamed[counted]}"
    device = tensors[0].device.type if tensors else "cpu"
    request = Request(
        name,
        kind,
        tuple(describe(tensor) for tensor in tensors),
        members=process_set.process_set_id,
        device=device,
        **facts,
    )
    operation = Collective(request, list(tensors), list(outputs), single=single)
    session.engine.submit(operation, at_once=at_once)
    handle = next(_numbers)
    _handles[handle] = operation
    return handle


def poll(handle: int) -> bool:
    """Whether ``synchronize`` would return at once."""
    operation = _handles.get(handle)
    if operation is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return session.engine.is_done(operation)


def synchronize(handle: int) -> Any:
    """The result of an asynchronous collective; None for a handle that was asked for before.

    Raises:
        HorovodInternalError: it failed.
    """
    operation = _handles.pop(handle, None)
    return None if operation is None else _wait(operation)


def _wait(operation: Collective) -> Any:
    try:
        return session.engine.wait(operation)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ConnectionError) as error:
        raise HorovodInternalError(str(error)) from error


def _check(kind: str, tensor: Tensor) -> None:
    if tensor.dtype not in (_REDUCED if kind in ("allreduce", "reducescatter") else _MOVED):
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")


def choose_op(op: int | None, average: bool | None) -> int:
    """The reduction that old and new arguments say.

    Raises:
        ValueError: both are given.
    """
    if op is not None:
        if average is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        return op
    if average is None:
        return Average
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum


# -- reductions ------------------------------------------------------------------------------------


def _begin_reduction(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    single: bool = True,
    at_once: bool = False,
) -> int:
    if op not in (Average, Sum, Adasum, Min, Max, Product):
        raise HorovodInternalError("Reduction op type not supported.")
    if op == Adasum:
        _check_adasum(tensors, process_set)
    return begin(
        "allreduce",
        tensors,
        outputs,
        name=name,
        process_set=process_set,
        single=single,
        at_once=at_once,
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


def _check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if size() & (size() - 1):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise HorovodInternalError("Adasum is for floating-point tensors")


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle to the reduction of ``tensor``, which is not changed."""
    op = choose_op(op, average)
    output = tensor.new_empty(tensor.shape)
    scales = prescale_factor, postscale_factor
    return _begin_reduction([tensor], [output], name, op, *scales, process_set)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, op: int, scales: tuple[float, float], name: Any, process_set: Any
    ) -> Tensor:
        ctx.facts = op, scales, process_set
        output = tensor.new_empty(tensor.shape)
        return synchronize(
            _begin_reduction([tensor], [output], name, op, *scales, process_set, at_once=True)
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        op, scales, process_set = ctx.facts
        grad_output = grad_output.contiguous()
        return _Allreduce.apply(grad_output, op, scales, None, process_set), None, None, None, None


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction of ``tensor`` over all processes; gradients flow through it."""
    op = choose_op(op, average)
    sent, context = compression.compress(tensor)
    scales = prescale_factor, postscale_factor
    return compression.decompress(_Allreduce.apply(sent, op, scales, name, process_set), context)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle to the reduction of ``tensor`` in place."""
    op = choose_op(op, average)
    scales = prescale_factor, postscale_factor
    return _begin_reduction([tensor], [tensor], name, op, *scales, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """``tensor``, reduced over all processes in place."""
    op = choose_op(op, average)
    scales = prescale_factor, postscale_factor
    return synchronize(
        _begin_reduction([tensor], [tensor], name, op, *scales, process_set, at_once=True)
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle to the reduction of ``tensors`` together."""
    op = choose_op(op, average)
    outputs = [tensor.new_empty(tensor.shape) for tensor in tensors]
    scales = prescale_factor, postscale_factor
    return _begin_reduction(tensors, outputs, name, op, *scales, process_set, single=False)


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: int,
        scales: tuple[float, float],
        name: Any,
        process_set: Any,
        *tensors: Tensor,
    ) -> Any:
        ctx.facts = op, scales, process_set
        return synchronize(
            grouped_allreduce_async(tensors, None, name, op, *scales, process_set=process_set)
        )

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        op, scales, process_set = ctx.facts
        given = [gradient.contiguous() for gradient in grad_output]
        gradients = _GroupedAllreduce.apply(op, scales, None, process_set, *given)
        return None, None, None, None, *gradients


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """The reductions of ``tensors``, done together; gradients flow through them."""
    op = choose_op(op, average)
    sent, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    scales = prescale_factor, postscale_factor
    reduced = _GroupedAllreduce.apply(op, scales, name, process_set, *sent)
    return [compression.decompress(t, c) for t, c in zip(reduced, contexts, strict=True)]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle to the reduction of ``tensors`` together, in place."""
    op = choose_op(op, average)
    scales = prescale_factor, postscale_factor
    return _begin_reduction(tensors, tensors, name, op, *scales, process_set, single=False)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """``tensors``, reduced over all processes together and in place."""
    scales = prescale_factor, postscale_factor
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, *scales, process_set=process_set)
    )


def sparse_allreduce_async(
    tensor: Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """What waits for a reduction of a sparse tensor, which gathers indices and values."""
    values = allgather_async(tensor._values(), name=f"{name}.values", process_set=process_set)
    places = tensor._indices().transpose(0, 1).contiguous()
    indices = allgather_async(places, name=f"{name}.indices", process_set=process_set)

    def finish() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.transpose(0, 1), all_values, tensor.size())

    return finish


# -- gathering -------------------------------------------------------------------------------------


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A handle to the rows of all processes, which may have different numbers of them."""
    return _begin_gather([tensor], name, process_set)


def _begin_gather(
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    single: bool = True,
    at_once: bool = False,
) -> int:
    if not all(tensor.dim() for tensor in tensors):
        raise HorovodInternalError("Rank zero tried to ALLGATHER a rank-zero tensor.")
    return begin(
        "allgather",
        tensors,
        (),
        name=name,
        process_set=process_set,
        single=single,
        at_once=at_once,
    )


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, single: bool, *tensors: Tensor) -> Any:
        ctx.facts = [tensor.shape[0] for tensor in tensors], process_set
        return synchronize(_begin_gather(tensors, name, process_set, single=single, at_once=True))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        rows, process_set = ctx.facts
        given = [gradient.contiguous() for gradient in grad_output]
        averages = grouped_allreduce(given, op=Average, process_set=process_set)
        counts = allgather(torch.tensor([rows], dtype=torch.int64), process_set=process_set)
        begins = counts[: process_set.rank()].sum(0).tolist()
        parts = zip(averages, begins, rows, strict=True)
        return None, None, None, *[part.narrow(0, begin, count) for part, begin, count in parts]


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The rows of all processes; gradients flow through it."""
    return _Allgather.apply(name, process_set, True, tensor)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle to the rows of all processes, of several tensors."""
    return _begin_gather(tensors, name, process_set, single=False)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows of all processes, of several tensors; gradients flow through it."""
    return _Allgather.apply(name, process_set, False, *tensors)


# -- broadcast -------------------------------------------------------------------------------------


def _begin_broadcast(
    tensor: Tensor,
    output: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    at_once: bool = False,
) -> int:
    if root_rank not in (process_set.ranks or ()):
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set"
        )
    return begin(
        "broadcast",
        [tensor],
        [output],
        name=name,
        process_set=process_set,
        at_once=at_once,
        root=int(root_rank),
    )


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle to the root's tensor; ``tensor`` is not changed."""
    output = tensor.new_empty(tensor.shape)
    return _begin_broadcast(tensor, output, root_rank, name, process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Any, process_set: Any) -> Tensor:
        ctx.facts = root_rank, process_set
        output = tensor.new_empty(tensor.shape)
        return synchronize(
            _begin_broadcast(tensor, output, root_rank, name, process_set, at_once=True)
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        root_rank, process_set = ctx.facts
        reduced = allreduce(grad_output.contiguous(), op=Average, process_set=process_set)
        if rank() != root_rank:
            reduced = reduced * 0
        return reduced, None, None, None


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The root's tensor; gradients flow through it."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle to ``tensor``, which becomes the root's."""
    return _begin_broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """``tensor``, which becomes the root's."""
    return synchronize(_begin_broadcast(tensor, tensor, root_rank, name, process_set, at_once=True))


# -- exchanging ------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Iterable[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle to the rows that all others have for this process, and how many each has.

    Raises:
        ValueError: ``splits`` do not fit the tensor, or the number of processes.
    """
    counts = _check_splits(tensor, splits, len(process_set.ranks or ()))
    return begin("alltoall", [tensor], (), name=name, process_set=process_set, splits=counts)


def _check_splits(
    tensor: Tensor, splits: Tensor | Iterable[int] | None, members: int
) -> tuple[int, ...]:
    if not tensor.dim():
        raise ValueError("alltoall wants a tensor with a first dimension")
    rows = tensor.shape[0]
    if splits is None or (isinstance(splits, Tensor) and not splits.numel()):
        if rows % members:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the "
                "number of workers."
            )
        return (rows // members,) * members
    if isinstance(splits, Tensor) and splits.dtype != torch.int32:
        raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    counts = tuple(int(count) for count in splits)
    if len(counts) != members:
        raise ValueError("Number of entries in splits does not equal number of workers.")
    if sum(counts) > rows:
        raise ValueError("Sum of splits entries is greater than the first dimension of tensor.")
    return counts


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.facts = received, process_set
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        received, process_set = ctx.facts
        back, _ = alltoall(grad_output.contiguous(), received, process_set=process_set)
        return back, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Iterable[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows that all others have for this process, and with ``splits`` how many each has."""
    return _Alltoall.apply(tensor, splits, name, process_set)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """A handle to this process's rows of the reduction."""
    scales = prescale_factor, postscale_factor
    return _begin_scatter([tensor], name, op, *scales, process_set)


def _begin_scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    single: bool = True,
) -> int:
    for tensor in tensors:
        _check("reducescatter", tensor)
    if op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    if not all(tensor.dim() for tensor in tensors):
        raise ValueError("Reducescatter does not support scalar inputs")
    return begin(
        "reducescatter",
        tensors,
        (),
        name=name,
        process_set=process_set,
        single=single,
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: int,
        scales: tuple[float, float],
        name: Any,
        process_set: Any,
        single: bool,
        *tensors: Tensor,
    ) -> Any:
        ctx.facts = op, scales, process_set
        return synchronize(_begin_scatter(tensors, name, op, *scales, process_set, single=single))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        op, scales, process_set = ctx.facts
        factor = scales[0] * scales[1] * (process_set.size() if op == Sum else 1)
        given = [(gradient * factor).contiguous() for gradient in grad_output]
        gathered = grouped_allgather(given, process_set=process_set)
        return None, None, None, None, None, *gathered


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This process's rows of the reduction; gradients flow through it."""
    sent, context = compression.compress(tensor)
    scales = prescale_factor, postscale_factor
    scattered = _Reducescatter.apply(op, scales, name, process_set, True, sent)
    return compression.decompress(scattered, context)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """A handle to this process's rows of the reductions of several tensors."""
    scales = prescale_factor, postscale_factor
    return _begin_scatter(tensors, name, op, *scales, process_set, single=False)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """This process's rows of the reductions of several tensors; gradients flow through them."""
    sent, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    scales = prescale_factor, postscale_factor
    scattered = _Reducescatter.apply(op, scales, name, process_set, False, *sent)
    return [compression.decompress(t, c) for t, c in zip(scattered, contexts, strict=True)]


# -- waiting ---------------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """Says that this process has no more data, and waits; returns the rank that came last.

    Until then it contributes zeros to what the others reduce.
    """
    try:
        last = session.engine.join()
    except (RuntimeError, ConnectionError) as error:
        raise HorovodInternalError(str(error)) from error
    _unnamed.clear()  # those who came first have counted less
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns once every process of the set has called it."""
    synchronize(begin("barrier", (), (), name=None, process_set=process_set, at_once=True))
