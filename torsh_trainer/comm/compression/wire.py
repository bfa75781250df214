"""Collectives that count what they move."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm.base import Communicator


class Traffic(NamedTuple):
    """Bytes of gradients that a rank has sent and received."""

    sent_bytes: int = 0
    received_bytes: int = 0


class Wire:
    """Asynchronous collectives among the members of ``comm``, counted.

    Counted is what a ring moves at each rank, which is the least for an all-reduce and exact for
    an all-gather: of n ranks, ``2 (n-1)/n`` of a tensor that is summed, and n-1 copies of a
    payload that everybody gets.
    """

    def __init__(self, comm: Communicator) -> None:
        self.size = comm.size
        self.rank = comm.rank
        self.group = comm.process_group
        self.device = comm.device
        self.sent_bytes = 0
        self.received_bytes = 0

    @property
    def traffic(self) -> Traffic:
        """All that has been moved so far."""
        return Traffic(self.sent_bytes, self.received_bytes)

    def all_reduce(self, tensor: Tensor) -> Any:
        """Begins to sum ``tensor`` over all ranks, in place; a torch ``Work``."""
        self.count_sum(_bytes(tensor), size=self.size)
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def all_gather(self, payload: Tensor) -> tuple[Any, Tensor]:
        """Begins to collect everybody's ``payload``: the ``Work``, and the rows by rank."""
        self._count((self.size - 1) * _bytes(payload))
        rows = payload.new_empty(self.size * payload.numel())
        work = dist.all_gather_single(rows, payload, group=self.group, async_op=True)
        return work, rows.view(self.size, -1)

    def counts(self, mine: Tensor) -> list[list[int]]:
        """Everybody's numbers (int64, 1-D) by rank, waited for: the host reads them."""
        work, rows = self.all_gather(mine)
        work.wait()
        numbers: list[list[int]] = rows.tolist()
        return numbers

    def any(self, flag: Tensor) -> bool:
        """Whether ``flag`` (0-dim) holds on some rank, waited for."""
        return any(row[0] for row in self.counts(flag.long().view(1)))

    def count_sum(self, nbytes: int, *, size: int) -> None:
        """Counts an all-reduce of so many bytes among ``size`` ranks, whoever calls it."""
        self._count(2 * nbytes * (size - 1) // size)

    def count_exchange(self, nbytes: int, *, size: int) -> None:
        """Counts a reduce-scatter or an all-to-all of so many bytes among ``size`` ranks."""
        self._count(nbytes * (size - 1) // size)

    def _count(self, moved: int) -> None:
        self.sent_bytes += moved
        self.received_bytes += moved


def asks_host(tensor: Tensor) -> bool:
    """Whether the host may look at its values: an accelerator would have to end its work first."""
    return tensor.is_cpu


def keep_for_stream(*tensors: Tensor) -> None:
    """Tells CUDA's allocator that the stream of this callback uses ``tensors``, too."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
