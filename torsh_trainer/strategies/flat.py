"""Gradients summed over ranks in flat buckets, after the whole backward: a part of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.reducer import GradientReducer, Slot
from torsh_trainer.optim.precision import DTYPES, Precision, sum_dtype
from torsh_trainer.strategies.sums import Entering


class FlatReduction:
    """Buckets of at most ``cap_mb`` MiB, summed in ``precision.reduce``, or by ``reducer``.

    ``enter`` is what a bucket is multiplied by first.
    """

    def __init__(
        self,
        comm: Communicator,
        precision: Precision,
        *,
        cap_mb: float,
        enter: Entering,
        reducer: GradientReducer | None,
    ) -> None:
        self._comm = comm
        self._cap_mb = cap_mb
        self._enter = enter
        self._reducer = reducer
        self._held, self._sent = DTYPES[precision.gradients], DTYPES[precision.reduce]

    def reduce(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Sums their gradients, zeros where there is none. Collective."""
        gradients = []
        for _, parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        names = [name for name, _ in parameters]
        for bucket in _buckets(gradients, self._cap_mb):
            flat = self._enter(_flatten_dense_tensors(bucket))
            if self._reducer is not None:
                mine, names = names[: len(bucket)], names[len(bucket) :]
                sizes = [gradient.numel() for gradient in bucket]
                self._reducer.reduce(flat, Slot.row(list(zip(mine, sizes, strict=True))))
                _copy_back(flat, bucket)
                continue
            held = flat.to(sum_dtype(flat.dtype, self._held))
            reduced = held.to(sum_dtype(flat.dtype, self._sent))
            self._comm.all_reduce(reduced, op="sum")
            _copy_back(reduced.to(flat.dtype), bucket)

    def find_used(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those of ``parameters`` that any rank has a gradient for. Collective."""
        used = torch.tensor([float(p.grad is not None) for p in parameters])
        used = self._comm.to_device(used)
        self._comm.all_reduce(used, op="max")
        return [p for p, flag in zip(parameters, used.tolist(), strict=True) if flag]


def _copy_back(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    """Gives each gradient its part of ``flat``, which holds them one after the other."""
    parts = flat.split([gradient.numel() for gradient in gradients])
    views = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    torch._foreach_copy_(list(gradients), views)


def _buckets(gradients: Sequence[Tensor], cap_mb: float) -> Iterator[list[Tensor]]:
    """Gradients of one dtype together, each bucket at most ``cap_mb`` MiB (or one tensor)."""
    cap = cap_mb * 2**20
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        nbytes = gradient.numel() * gradient.element_size()
        if bucket and (size + nbytes > cap or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += nbytes
    if bucket:
        yield bucket
