"""Whether the weights in a state are numbers still."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator


def first_nonfinite(
    model: Mapping[str, Any], names: Iterable[str], comm: Communicator
) -> str | None:
    """The first of the parameters ``names`` in a model's state that is not finite on some rank.

    Costs one pass over this rank's part of them, and one read. Collective.
    """
    parts = {name: _local(model[name]) for name in names if name in model}
    parts = {name: part for name, part in parts.items() if part.numel()}
    finite = _finite(list(parts.values()))
    bad = [name for name, is_finite in zip(parts, finite, strict=True) if not is_finite]
    if not comm.reduce_values([float(bool(bad))])[0]:
        return None
    by_rank = comm.all_gather_object(bad[:1])
    return next(name for names in by_rank for name in names)


def _finite(parts: list[Tensor]) -> list[bool]:
    if not parts:
        return []
    # The largest absolute value is NaN or infinite where any is; no sum that could overflow.
    largest = torch._foreach_norm(parts, float("inf"))
    finite: list[bool] = torch.isfinite(torch.stack([one.float() for one in largest])).tolist()
    return finite


def _local(entry: Any) -> Tensor:
    if isinstance(entry, FlatShard):
        entry = entry.tensor
    if isinstance(entry, DTensor):
        entry = entry.to_local()
    tensor: Tensor = entry.detach()
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.new_empty(0)
