"""Modules handed over to FSDP2, which cuts their parameters over a mesh of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from torsh_trainer.errors import Unsupported
from torsh_trainer.optim.precision import DTYPES
from torsh_trainer.strategies.base import Job
from torsh_trainer.strategies.merging import Unit


def shard(
    roots: list[Unit],
    units: list[Unit],
    job: Job,
    *,
    place: Callable[[Sequence[nn.Parameter]], None],
    placement: Callable[[nn.Parameter], Any] | None,
    mesh: Any,
    uncut: set[nn.Parameter],
    cpu_offload: bool,
    reshard_after_forward: bool,
    prefetch_depth: int | None,
    refuse: Callable[..., Unsupported],
) -> None:
    """Has FSDP2 cut ``units``, inner ones, and ``roots``, all but ``uncut``.

    ``place`` gives parameters their values on the device, which they may not have before, and may
    put parts in their place; ``placement`` says along which dimension one is cut (None: the first).

    One after the other comes to the device and is cut there, so that never more than one of them
    is there whole. Both lists are empty afterwards: they would keep the whole parameters alive.

    Raises:
        Unsupported: of a class that FSDP2 cannot take, as ``refuse`` says it.
    """
    # Imported here: torch.distributed.fsdp costs every other strategy's start-up.
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    low = DTYPES[job.precision.params]
    param_dtype = None if low == torch.float32 else low
    output_dtype = job.precision.output_dtype

    def policy(unit: Unit, output: torch.dtype | None = None) -> MixedPrecisionPolicy:
        wide = job.precision.reduce == "fp32" and torch.float64 in unit.kinds
        return MixedPrecisionPolicy(
            param_dtype=param_dtype,
            reduce_dtype=torch.float64 if wide else DTYPES[job.precision.reduce],
            output_dtype=output,
        )

    # Pinned memory exists only beside an accelerator; FSDP2's default raises on a CPU.
    offload: Any = (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    )
    common: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": offload,
        "ignored_params": uncut,
        "shard_placement_fn": placement,
    }
    chain = [cast(FSDPModule, unit.modules[0]) for unit in units]
    while units or roots:
        inner = bool(units)
        part = (units if inner else roots).pop(0)
        place(part.parameters)
        policies = policy(part, None if inner else output_dtype)
        try:
            fully_shard(list(part.modules), mp_policy=policies, **common)
        except TypeError as error:
            if "object layout differs" not in str(error):
                raise
            raise refuse(
                f"the class {part.words.partition(' ')[2]}, which FSDP2 cannot put another "
                "class upon",
                use="let it inherit from its module first: class Net(nn.Module, Generic[T])",
            ) from error
    if prefetch_depth is not None:
        for i, link in enumerate(chain):
            link.set_modules_to_forward_prefetch(chain[i + 1 : i + 1 + prefetch_depth])
            before = chain[max(0, i - prefetch_depth) : i]
            link.set_modules_to_backward_prefetch(before[::-1] or [link])
