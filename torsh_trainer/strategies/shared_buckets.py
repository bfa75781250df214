"""DDP's gradient buckets averaged in memory that the members share, where a backend has it.

DDP allocates its buckets itself, but takes what a communication hook returns, wherever that lies.
The hook writes each bucket, divided as DDP would divide it, to where all members reach it.
"""

from __future__ import annotations

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
        # Through a lambda: torch compares annotations, and cannot read ours, which are strings.
        ddp.register_comm_hook(_SharedBuckets(comm), lambda hook, bucket: hook(bucket))


class _SharedBuckets:
    """A hook of DDP, which calls it for the same buckets in the same order on every rank.

    DDP has copied a result into the gradients when its backward ends, so the next one may take its
    place. Buckets change when DDP lays out new ones; what is no longer needed is then let go.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._shared: dict[int, Tensor | None] = {}
        self._sizes: dict[int, tuple[int, torch.dtype]] = {}

    @torch.no_grad()
    def __call__(self, bucket: Any) -> Future[Tensor]:
        flat = bucket.buffer()
        dense = flat.layout is torch.strided  # what is not, the backend itself takes or refuses
        shared = self._place(bucket.index(), flat) if dense else None
        mean = flat if shared is None else shared
        torch.mul(flat, 1.0 / self._comm.world.size, out=mean)
        if bucket.is_last():  # it is waited for at once: cheapest in this thread
            self._comm.all_reduce(mean)
            future: Future[Tensor] = Future()
            future.set_result(mean)
            return future
        work = dist.all_reduce(mean, group=self._comm.process_group, async_op=True)
        assert work is not None, "async_op gives one"
        return work.get_future().then(lambda ended: ended.value()[0])

    def _place(self, index: int, flat: Tensor) -> Tensor | None:
        """Where members reach what will be the mean of ``flat``; None where it is too small."""
        size = flat.numel(), flat.dtype
        if self._sizes.get(index) != size:
            self._sizes[index] = size
            self._shared.pop(index, None)
            shares = self._comm.shares(flat.numel())
            self._shared[index] = self._comm.zeros(*size) if shares else None
        return self._shared[index]
