"""DDP's gradients summed over processes, where torch's wrapper by itself averages them.

A loss that is scaled up to undo an average is seen so by every hook in its backward.

The wrapper divides by the number of processes that it was told to take part in a forward (its
``join``). Told one, it sums, at no cost. torch has no public name for that; where a release has
none at all, a communication hook sums, which costs a call of Python for every bucket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from torsh_trainer.optim.precision import DTYPES, Precision, sum_dtype


class Entering:
    """What gradients are multiplied by before they are reduced; one for an engine and its hooks.

    They are summed, and averaged within ``averaging`` or, with ``averages``, always. ``ranks`` is
    their number, and ``gives_means`` says that what reduces them averages.
    """

    def __init__(self, ranks: int, *, gives_means: bool = False, averages: bool = False) -> None:
        total = float(ranks) if gives_means else 1.0
        self._mean = total / ranks
        self._factor = self._mean if averages else total
        self._ddp: DistributedDataParallel | None = None
        self._one = torch.futures.Future[list[Tensor]]()
        self._one.set_result([torch.ones(1)])

    def __call__(self, flat: Tensor) -> Tensor:
        """``flat`` itself, multiplied in place."""
        return flat if self._factor == 1.0 else flat.mul_(self._factor)

    @contextlib.contextmanager
    def averaging(self) -> Iterator[None]:
        """Within, gradients are averaged."""
        before, self._factor = self._factor, self._mean
        self.tell()
        try:
            yield
        finally:
            self._factor = before
            self.tell()

    def drive(self, ddp: DistributedDataParallel) -> bool:
        """Has ``ddp``, which has no hook, reduce so; False where this torch knows no way."""
        if not hasattr(ddp.reducer, _TOLD) or not hasattr(_C10D, _WORK):
            return False
        # Held in this case alone: of what hooks hold, which C++ keeps, no cycle is ever collected.
        self._ddp = ddp
        self.tell()
        return True

    def tell(self) -> None:
        """Tells the wrapper, which forgets it where it makes a reducer anew."""
        if self._ddp is not None:
            work = getattr(_C10D, _WORK)(self._one)
            getattr(self._ddp.reducer, _TOLD)(work, self._factor != 1.0)


_C10D: Any = getattr(torch._C, "_distributed_c10d", None)
_TOLD, _WORK = "_set_forward_pass_work_handle", "_create_work_from_future"


def register_hook(ddp: DistributedDataParallel, hook: Callable[[Any], Future[Tensor]]) -> None:
    """Has ``hook`` reduce the buckets of ``ddp``."""
    # Through a lambda: torch compares annotations, and cannot read ours, which are strings.
    ddp.register_comm_hook(hook, lambda hook, bucket: hook(bucket))


def sum_buckets(ddp: DistributedDataParallel, enter: Entering) -> None:
    """Sums buckets as they are."""
    group = ddp.process_group
    if not enter.drive(ddp):
        register_hook(ddp, lambda bucket: start_sum(enter(bucket.buffer()), group))


def sum_in(ddp: DistributedDataParallel, precision: Precision, enter: Entering) -> None:
    """Sums buckets in ``precision.reduce``; torch's own hooks refuse gloo.

    What is sent is rounded first to the dtype that gradients are held in.
    """
    group = ddp.process_group
    held, sent = DTYPES[precision.gradients], DTYPES[precision.reduce]

    def hook(bucket: Any) -> Future[Tensor]:
        full = enter(bucket.buffer())
        small = full.to(sum_dtype(full.dtype, held)).to(sum_dtype(full.dtype, sent))
        return start_sum(small, group).then(lambda ended: full.copy_(ended.value()))

    register_hook(ddp, hook)


def start_sum(flat: Tensor, group: Any) -> Future[Tensor]:
    """``flat`` once it holds the sum over ``group``."""
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None, "async_op gives one"
    future: Future[Any] = work.get_future()
    return future.then(_first)


def _first(ended: Future[Any]) -> Tensor:
    tensor: Tensor = ended.value()[0]
    return tensor
