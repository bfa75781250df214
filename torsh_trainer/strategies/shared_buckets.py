"""DDP's gradient buckets averaged through memory that the members share, where a backend has it.

DDP allocates its buckets itself, outside that memory. There each member puts what the others add
up, and takes what they have added: DDP finds the mean in its own bucket, and has nothing to copy.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from torsh_trainer.comm.base import Communicator


def share_buckets(ddp: DistributedDataParallel, comm: Communicator) -> None:
    """Registers the hook if members of ``comm`` share memory; collective."""
    most = sum(p.numel() for p in ddp.parameters() if p.requires_grad)
    if comm.shares(most):
        hook = _SharedBuckets(comm, overlaps=_spare_processors(comm))
        # Through a lambda: torch compares annotations, and cannot read ours, which are strings.
        ddp.register_comm_hook(hook, lambda hook, bucket: hook(bucket))


def _spare_processors(comm: Communicator) -> bool:
    """Whether members, who are on one host, have more processors than threads that compute."""
    if not hasattr(os, "sched_getaffinity"):
        return True
    told = comm.all_gather_object((os.sched_getaffinity(0), torch.get_num_threads()))
    return len(set().union(*(own for own, _ in told))) > sum(threads for _, threads in told)


class _SharedBuckets:
    """A hook of DDP, which calls it for the same buckets in the same order on every rank.

    Without ``overlaps`` the buckets wait for the last one. Where every processor computes, another
    thread would take it from the backward that it runs beside.
    """

    def __init__(self, comm: Communicator, *, overlaps: bool) -> None:
        self._comm = comm
        self._overlaps = overlaps
        self._known: set[tuple[int, torch.dtype]] = set()
        self._waiting: list[tuple[Tensor, Future[Tensor]]] = []

    @torch.no_grad()
    def __call__(self, bucket: Any) -> Future[Tensor]:
        flat = bucket.buffer()
        size = flat.numel(), flat.dtype
        if size not in self._known:
            self._known.add(size)
            self._comm.make_stage(*size)
        if self._overlaps and not bucket.is_last():
            work = dist.all_reduce(flat, dist.ReduceOp.AVG, self._comm.process_group, async_op=True)
            assert work is not None, "async_op gives one"
            return work.get_future().then(lambda ended: ended.value()[0])
        future: Future[Tensor] = Future()
        if bucket.index() == 0:
            self._waiting.clear()  # what a backward that failed has left
        self._waiting.append((flat, future))
        if bucket.is_last():  # DDP waits from here on: cheapest in this thread
            for waiting, promise in self._waiting:
                self._comm.all_reduce(waiting, op="mean")
                promise.set_result(waiting)
            self._waiting.clear()
        return future
