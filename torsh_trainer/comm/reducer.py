"""Gradients summed over ranks in flat buckets, from hooks, while backward goes on.

A gradient is copied into a flat bucket as soon as backward has made it, and a bucket is reduced as
soon as it is full. Buckets begin in reverse order of definition, and are always reduced in that
order: all ranks agree on it without a word, and a run that resumes sums as the one before it did.

A backward may add to one parameter several times (a layer that is used twice, once of them within
``torch.utils.checkpoint`` with ``use_reentrant=True``, is added to by a backward within the
backward). So a parameter's bucket waits for the end of the backward in which its gradient comes
for the first time, and always if it came more than once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator, Work
from torsh_trainer.errors import Unsupported

Reduce = Callable[[int, Tensor], "Work | None"]
"""(number of the bucket, its flat tensor) -> the sum over ranks in that tensor, under way."""

PIECE_BYTES = 256 * 2**20
"""Of what ranks are given at the start, at most so much is copied at a time."""

_Tensor = TypeVar("_Tensor", bound=Tensor)
_living: weakref.WeakSet[BucketReducer] = weakref.WeakSet()


def reducer_of(parameter: nn.Parameter) -> BucketReducer | None:
    """Who reduces this parameter's gradient from hooks, or in an engine; None where nobody does."""
    return next((reducer for reducer in _living if reducer.reduces(parameter)), None)


class BucketReducer:
    """Sums the gradients of ``parameters`` over the members of ``comm``.

    ``bucket_cap_mb`` is the size of a bucket in MiB; a larger parameter is a bucket of its own.
    Gradients of a dtype are summed in what ``dtype`` makes of it (None: in that), and each enters
    the sum times ``factor``. With ``overlap`` buckets are reduced while backward goes on, else all
    of them in ``finish``. With ``finishes`` the end of a backward pass calls ``finish`` itself.
    ``find_unused`` leaves a gradient that no rank has at None instead of zero, at the price of one
    small reduction; with ``static`` the first answer holds for good. With ``as_views`` gradients
    are views of the buckets afterwards, else they are copied back. ``reduce`` replaces the plain
    all-reduce of a bucket, ``on_finish`` is called after every ``finish``.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        *,
        bucket_cap_mb: float = 25.0,
        dtype: Callable[[torch.dtype], torch.dtype] | None = None,
        overlap: bool = True,
        finishes: bool = False,
        find_unused: bool = False,
        static: bool = False,
        as_views: bool = True,
        factor: float = 1.0,
        reduce: Reduce | None = None,
        on_finish: Callable[[], None] | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self.factor = factor
        self.reduce: Reduce = reduce or self._all_reduce
        self.syncs = True
        """Whether the next backward communicates."""
        self.unused: list[nn.Parameter] = []
        self._comm = comm
        self._on_finish = on_finish
        self._find_unused = find_unused
        self._static = static
        self._as_views = as_views
        self._known_nowhere: set[nn.Parameter] | None = None
        self._queued = False
        self._next = 0  # the first bucket that has not been sent
        self._waits = set(self.parameters)  # not known to be added to once in a backward
        self._repeated: set[nn.Parameter] = set()  # those of them that are known not to be
        self._added: dict[nn.Parameter, int] = {}  # how often, in this backward
        groups = cut(reversed(self.parameters), cap_bytes=int(bucket_cap_mb * 2**20))
        kinds = [group[0].dtype if dtype is None else dtype(group[0].dtype) for group in groups]
        self.buckets = [
            Bucket(g, kind, comm, lends=as_views) for g, kind in zip(groups, kinds, strict=True)
        ]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        hook = self._hook(overlap=overlap, finishes=finishes)
        self._hooks: list[Any] = []
        if hook is not None:
            trained = [p for p in self.parameters if p.requires_grad]
            self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in trained]
        _living.add(self)

    def reduces(self, parameter: nn.Parameter) -> bool:
        """Whether it is one of these."""
        return parameter in self._bucket_of

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        """Backward within adds to local gradients and communicates nothing."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def finish(self) -> list[nn.Parameter]:
        """Reduces what is left, and gives every parameter its gradient.

        Returns the parameters for which this rank had none (``unused`` keeps them).
        """
        self._queued = False
        self.unused = []
        for bucket in self.buckets[self._next :]:
            for parameter in list(bucket.missing):
                if parameter.grad is None:
                    self.unused.append(parameter)
                bucket.take(parameter, self.factor)
                bucket.missing.discard(parameter)
            self._send()
        self._learn()
        nowhere = self._nowhere() if self._find_unused else set()
        for bucket in self.buckets:
            bucket.give_back(nowhere, as_views=self._as_views)
        self._next = 0
        if self._on_finish is not None:
            self._on_finish()
        return self.unused

    def close(self) -> None:
        """Takes the hooks off and lets go of the buckets."""
        for hook in self._hooks:
            hook.remove()
        self.buckets, self._bucket_of, self._hooks = [], {}, []

    # -- hooks -----------------------------------------------------------------------------------

    def _hook(self, *, overlap: bool, finishes: bool) -> Callable[[nn.Parameter], None] | None:
        if not finishes:
            return self._take if overlap else None
        return self._take_and_queue if overlap else self._queue

    def _take(self, parameter: nn.Parameter) -> None:
        """The hook of a parameter whose gradient is there."""
        if not self.syncs:
            return
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:
            raise _comes_late(parameter)
        bucket.take(parameter, self.factor)
        bucket.lend(parameter)
        if parameter in self._waits:
            self._added[parameter] = self._added.get(parameter, 0) + 1
            return
        bucket.missing.discard(parameter)
        if not bucket.missing:
            self._send()

    def _learn(self) -> None:
        """Has those wait no longer whose gradient came once in this backward."""
        if self._added:
            repeated = {p for p, times in self._added.items() if times > 1}
            self._repeated |= repeated
            self._waits -= self._added.keys() - self._repeated
            self._added = {}

    def _take_and_queue(self, parameter: nn.Parameter) -> None:
        self._queue(parameter)
        self._take(parameter)

    def _queue(self, parameter: nn.Parameter) -> None:
        """Has the end of this backward pass call ``finish``, as torch's own DDP has it."""
        if self.syncs and not self._queued:
            self._queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.finish)

    def _send(self) -> None:
        """Reduces every bucket whose turn it is."""
        buckets = self.buckets
        while self._next < len(buckets) and not buckets[self._next].missing:
            bucket = buckets[self._next]
            if bucket.lends and self.factor != 1.0:
                bucket.flat.mul_(self.factor)
            bucket.work = self.reduce(self._next, bucket.flat)
            self._next += 1

    def _all_reduce(self, number: int, flat: Tensor) -> Work | None:
        # The last one is waited for at once; on a CPU that is cheapest in this thread.
        last = number + 1 == len(self.buckets)
        return self._comm.all_reduce(flat, async_op=not (last and flat.is_cpu))

    def _nowhere(self) -> set[nn.Parameter]:
        """Those parameters that no rank has a gradient for."""
        if self._known_nowhere is not None:
            return self._known_nowhere
        unused = set(self.unused)
        used = torch.tensor([float(p not in unused) for p in self.parameters])
        used = self._comm.to_device(used)
        self._comm.all_reduce(used, op="max")
        flags = used.tolist()
        nowhere = {p for p, flag in zip(self.parameters, flags, strict=True) if not flag}
        if self._static:
            self._known_nowhere = nowhere
        return nowhere


class Bucket:
    """Gradients that travel together, in one flat tensor of the dtype in which they are summed.

    Where that is the parameters' own dtype, gradients may be views of it (``lends``): what backward
    adds to them later is in the bucket then, and all of it is scaled once nothing more comes.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        comm: Communicator,
        *,
        lends: bool = False,
    ) -> None:
        self.parameters = tuple(parameters)
        self.lends = lends and dtype == parameters[0].dtype
        count = sum(p.numel() for p in parameters)
        memory, device = comm.shared_memory, parameters[0].device
        if memory is None:
            self.flat = torch.zeros(count, dtype=dtype, device=device)
        else:
            self.flat = memory.zeros(count, dtype).to(device)
        self.work: Work | None = None
        self._views: dict[nn.Parameter, Tensor] = {}
        offset = 0
        for parameter in parameters:
            part = self.flat[offset : offset + parameter.numel()]
            self._views[parameter] = like(parameter, part)
            offset += parameter.numel()
        self.missing = set(self.parameters)

    def take(self, parameter: nn.Parameter, factor: float) -> None:
        """Copies a gradient, times ``factor`` unless it is lent; zeros where there is none."""
        view, gradient = self._views[parameter], parameter.grad
        if gradient is None:
            view.zero_()
        elif factor == 1.0 or self.lends:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)

    def lend(self, parameter: nn.Parameter) -> None:
        """Makes the gradient a view, where it can be one, before the sum is there.

        What backward made is free then, and its next gradient gets that memory while it is still in
        the processor's cache.
        """
        if self.lends:
            parameter.grad = self._views[parameter]

    def give_back(self, without: set[nn.Parameter], *, as_views: bool = True) -> None:
        """Waits for the sum, and hands it to the parameters, as views or as copies."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        for parameter, view in self._views.items():
            if parameter in without:
                parameter.grad = None
            elif not as_views and parameter.grad is not None:
                parameter.grad.copy_(view)
            elif as_views and view.dtype == parameter.dtype:
                parameter.grad = view
            else:
                parameter.grad = view.to(parameter.dtype, copy=True)
        self.missing.update(self.parameters)


def _comes_late(parameter: nn.Parameter) -> Unsupported:
    return Unsupported(
        f"backward has added again to the gradient of a parameter of shape "
        f"{tuple(parameter.shape)}, which was already on its way to the other processes; until now "
        "it had added to it once (a layer that is used several times under "
        "torch.utils.checkpoint with use_reentrant=True, in some steps)",
        fix="give that checkpoint use_reentrant=False, or set strategy.overlap=false",
    )


def cut(parameters: Iterable[_Tensor], *, cap_bytes: int) -> list[list[_Tensor]]:
    """Consecutive parameters of one dtype and device, at most ``cap_bytes`` of them or one."""
    groups: list[list[_Tensor]] = []
    size = 0
    for parameter in parameters:
        first = groups[-1][0] if groups else None
        alike = first is not None and (
            (first.dtype, first.device) == (parameter.dtype, parameter.device)
        )
        if not alike or size + parameter.nbytes > cap_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return groups


def share(tensors: Iterable[Tensor], comm: Communicator) -> None:
    """Rank 0's values in every rank's ``tensors``, in place; those of one dtype go together.

    In pieces, so that a model needs no room for a second one: ``PIECE_BYTES`` at most, and none for
    a large tensor that lies where ranks communicate.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in by_kind.values():
        for group in cut(alike, cap_bytes=PIECE_BYTES):
            if len(group) == 1:
                _share_one(group[0], comm)
            else:
                _share_joined(group, comm)


def _share_one(tensor: Tensor, comm: Communicator) -> None:
    if not tensor.is_contiguous() or tensor.device != comm.device:
        _share_joined([tensor], comm)
        return
    for part in tensor.view(-1).split(max(1, PIECE_BYTES // tensor.element_size())):
        comm.broadcast(part, src=0)


def _share_joined(tensors: Sequence[Tensor], comm: Communicator) -> None:
    flat = comm.to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    comm.broadcast(flat, src=0)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(part.view(tensor.shape))


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """``part`` in the shape of ``parameter``, and in its order in memory where it has no holes."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides, part.storage_offset())
