"""DDP's gradient buckets summed through memory that the members share, where a backend has it.

DDP allocates its buckets itself, outside that memory. There each member puts what the others add
up, and takes what they have added: DDP finds the sum in its own bucket, and has nothing to copy.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.shared_memory import Parts, SharedMemory
from torsh_trainer.strategies.sums import Entering, register_hook, start_sum

_Size = tuple[int, torch.dtype]


def share_buckets(ddp: DistributedDataParallel, comm: Communicator, enter: Entering) -> bool:
    """Registers the hook if members of ``comm`` share memory, and says whether; collective."""
    most = sum(p.numel() for p in ddp.parameters() if p.requires_grad)
    memory = comm.shared_memory
    if memory is None or not memory.shares(most):
        return False
    overlaps = _spare_processors(comm)
    register_hook(ddp, _SharedBuckets(ddp, comm, memory, enter, overlaps=overlaps))
    return True


def _spare_processors(comm: Communicator) -> bool:
    """Whether members, who are on one host, have more processors than threads that compute."""
    if not hasattr(os, "sched_getaffinity"):
        return True
    told = comm.all_gather_object((os.sched_getaffinity(0), torch.get_num_threads()))
    return len(set().union(*(own for own, _ in told))) > sum(threads for _, threads in told)


class _SharedBuckets:
    """A hook of DDP, which calls it for the same buckets in the same order on every rank.

    Without ``overlaps`` no other thread is used: it would take a processor from the backward that
    it runs beside. Once DDP has laid out the buckets for good they are copied while others fill.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        comm: Communicator,
        memory: SharedMemory,
        enter: Entering,
        *,
        overlaps: bool,
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._comm = comm
        self._memory = memory
        self._enter = enter
        self._overlaps = overlaps
        self._known: set[_Size] = set()
        self._waiting: list[tuple[Tensor, Future[Tensor]]] = []
        self._reducer = 0
        self._settled = False
        self._parts: Parts | None = None

    @torch.no_grad()
    def __call__(self, bucket: Any) -> Future[Tensor]:
        flat = self._enter(bucket.buffer())
        if self._overlaps and not bucket.is_last():
            self._stage(flat)
            return start_sum(flat, self._comm.process_group)
        if bucket.index() == 0:
            self._begin()
        future: Future[Tensor] = Future()
        self._waiting.append((flat, future))
        if self._parts is not None:
            self._parts.put(bucket.index(), flat)
        if bucket.is_last():  # DDP waits from here on: cheapest in this thread
            self._end()
        return future

    def _begin(self) -> None:
        self._waiting.clear()  # what a backward that failed has left
        ddp = self._ddp()
        assert ddp is not None, "it calls this"
        if self._reducer != id(ddp.reducer):  # it has been given another order; no reference: it
            self._reducer = id(ddp.reducer)  # has one to this hook that nobody sees
            self._parts, self._settled = None, False

    def _end(self) -> None:
        if self._parts is not None:
            self._parts.wait()
        for flat, future in self._waiting:
            if self._parts is None:
                self._stage(flat)
                self._comm.all_reduce(flat)
            future.set_result(flat)
        flats = [flat for flat, _ in self._waiting]
        self._waiting.clear()
        if not self._settled and not self._overlaps and self._has_last_layout():
            self._settled = True
            if len({flat.dtype for flat in flats}) == 1:
                counts = [flat.numel() for flat in flats]
                self._parts = self._memory.parts(counts, flats[0].dtype)

    def _has_last_layout(self) -> bool:
        """Whether DDP keeps the buckets of this pass; the same on every rank."""
        ddp = self._ddp()
        assert ddp is not None, "it calls this"
        if ddp.find_unused_parameters and not ddp.static_graph:
            return True
        return bool(getattr(ddp, "_has_rebuilt_buckets", False))

    def _stage(self, flat: Tensor) -> None:
        size = flat.numel(), flat.dtype
        if size not in self._known:
            self._known.add(size)
            self._memory.make_stage(*size)
