"""Gradients of an optimizer on their way: which travel together, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.dropin.horovod.common.exceptions import HorovodInternalError
from torsh_trainer.dropin.horovod.common.process_sets import ProcessSet
from torsh_trainer.dropin.horovod.common.util import split_list
from torsh_trainer.dropin.horovod.torch.compression import FP16Compressor, NoneCompressor
from torsh_trainer.dropin.horovod.torch.functions import broadcast_object
from torsh_trainer.dropin.horovod.torch.mpi_ops import (
    Average,
    begin,
    sparse_allreduce_async,
    synchronize,
)
from torsh_trainer.dropin.negotiation.coordinator import find_mismatch
from torsh_trainer.dropin.negotiation.engine import describe
from torsh_trainer.dropin.negotiation.requests import Request

BUCKET_BYTES = 25 * 2**20
"""How much travels together; a gradient that is larger travels alone, and is not copied."""


@dataclass
class GradientBucket:
    """Parameters whose gradients are reduced as one tensor, ``flat``."""

    name: str
    parameters: list[Tensor]
    sent: list[Tensor] = field(default_factory=list)
    flat: Tensor | None = None
    arrived: set[Tensor] = field(default_factory=set)
    handle: int | None = None


class Reducer:
    """Reduces the gradients of parameters, in buckets that all ranks cut alike.

    Buckets hold parameters from the last to the first, in which order backward comes by them, and
    are sent once all of theirs have a gradient. ``groups`` are the buckets where the user says
    them. Gradients that are sparse, and those of a compressor of the user's own, travel alone.
    """

    def __init__(
        self,
        name: str,
        names: Mapping[Tensor, str],
        *,
        compression: Any,
        op: int,
        predivide: float,
        groups: Any,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._name = name
        self._names = names
        self._compression = compression
        self._op = op
        self._scales = 1.0 / predivide, predivide
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._parameters: list[Tensor] = []
        self._buckets: dict[Tensor, GradientBucket] = {}
        self._under_way: list[GradientBucket] = []
        self._endings: list[Callable[[], None]] = []

    def start(self, parameters: Sequence[Tensor]) -> None:
        """These are the parameters, on every rank.

        Raises:
            HorovodInternalError: ranks have other parameters.
        """
        self._parameters = list(parameters)
        self._compare()
        self._cut(_fill(self._parameters[::-1]) if self._groups is None else self._group())

    def _compare(self) -> None:
        """A difference between ranks is named once, and not looked for in every step."""
        mine = [Request(self._names[p], "allreduce", (describe(p),)) for p in self._parameters]
        root = (self._process_set.ranks or [0])[0]
        theirs: list[Request] = broadcast_object(
            mine, root, name=f"{self._name}.parameters", process_set=self._process_set
        )
        for here, there in zip(mine, theirs, strict=False):
            if here.name != there.name:
                words = f"One rank has {there.name} where another has {here.name}"
                raise HorovodInternalError(f"Mismatched parameters: {words}.")
            if words := find_mismatch([there, here]):
                raise HorovodInternalError(f"{words} Parameter: {here.name}")
        if len(mine) != len(theirs):
            words = f"One rank has {len(theirs)}, but another rank has {len(mine)}"
            raise HorovodInternalError(f"Mismatched parameters: {words}.")

    # -- in a step -------------------------------------------------------------------------------

    def add(self, p: Tensor) -> None:
        """The gradient of ``p`` is there, or will not come: then it is zero."""
        if p.grad is None:
            p.grad = torch.zeros_like(p.data)
        if self._goes_alone(p):
            self._send_alone(p)
        bucket = self._buckets[p]
        bucket.arrived.add(p)
        if len(bucket.arrived) == len(bucket.parameters):
            self._send(bucket)

    def finish(self) -> None:
        """Every gradient is reduced when it returns."""
        under_way, self._under_way = self._under_way, []
        endings, self._endings = self._endings, []
        for bucket in under_way:
            self._take_back(bucket)
        for ending in endings:
            ending()

    def forget(self) -> None:
        """Gradients that wait for others of their bucket are forgotten."""
        for bucket in self._buckets.values():
            bucket.arrived.clear()

    # -- buckets ---------------------------------------------------------------------------------

    def _group(self) -> list[list[Tensor]]:
        """Buckets as the user says them."""
        if not isinstance(self._groups, list):
            return [list(part) for part in split_list(self._parameters, self._groups)]
        mine = {id(p) for p in self._parameters}
        parts = [[p for p in part if id(p) in mine] for part in self._groups]
        said = {id(p) for part in parts for p in part}
        return [*parts, *([p] for p in self._parameters if id(p) not in said)]

    def _cut(self, parts: Sequence[Sequence[Tensor]]) -> None:
        self._buckets = {}
        alike = [same for part in parts for same in _split_by_kind(part)]
        for number, part in enumerate(alike):
            bucket = GradientBucket(f"{self._name}.{number}", list(part))
            self._buckets.update(dict.fromkeys(part, bucket))

    def _send(self, bucket: GradientBucket) -> None:
        bucket.arrived.clear()
        bucket.sent = [p for p in bucket.parameters if not self._goes_alone(p)]
        gradients = [_gradient(p) for p in bucket.sent]
        if not gradients:
            return
        if len(gradients) == 1 and not self._halves and gradients[0].is_contiguous():
            whole = gradients[0].view(-1)
        else:
            count = sum(gradient.numel() for gradient in gradients)
            if bucket.flat is None or bucket.flat.numel() != count:
                bucket.flat = self._make_flat(gradients[0], count)
            whole = bucket.flat
            torch._foreach_copy_(_view(whole, gradients), gradients)
        bucket.handle = self._begin(whole, bucket.name)
        self._under_way.append(bucket)

    def _take_back(self, bucket: GradientBucket) -> None:
        assert bucket.handle is not None
        whole = synchronize(bucket.handle)
        gradients = [_gradient(p) for p in bucket.sent]
        if bucket.flat is not None and whole is bucket.flat:
            torch._foreach_copy_(gradients, _view(whole, gradients))

    @property
    def _halves(self) -> bool:
        return self._compression is FP16Compressor

    def _make_flat(self, first: Tensor, count: int) -> Tensor:
        halved = self._halves and first.is_floating_point()
        return first.new_empty(count, dtype=torch.float16 if halved else first.dtype)

    def _begin(self, tensor: Tensor, name: str) -> int:
        return begin(
            "allreduce",
            [tensor],
            [tensor],
            name=name,
            process_set=self._process_set,
            at_once=True,
            op=self._op,
            prescale=self._scales[0],
            postscale=self._scales[1],
        )

    # -- alone -----------------------------------------------------------------------------------

    def _goes_alone(self, p: Tensor) -> bool:
        if self._compression not in (NoneCompressor, FP16Compressor):
            return True
        return _gradient(p).is_sparse

    def _send_alone(self, p: Tensor) -> None:
        name, gradient = f"{self._name}.{self._names[p]}", _gradient(p)
        if gradient.is_sparse and not self._sparse_as_dense:
            op = self._op if self._op == Average else 1
            finish = sparse_allreduce_async(gradient, name, op, self._process_set)
            self._endings.append(lambda: _replace(p, finish()))
            return
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        sent, context = self._compression.compress(dense)
        handle = self._begin(sent.contiguous(), name)

        def end() -> None:
            reduced = self._compression.decompress(synchronize(handle), context)
            _replace(p, reduced.to_sparse() if gradient.is_sparse else reduced)

        self._endings.append(end)


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _replace(p: Tensor, reduced: Tensor) -> None:
    gradient = _gradient(p)
    if gradient.is_sparse:
        gradient.zero_().add_(reduced)
    else:
        gradient.copy_(reduced.view_as(gradient))


def _view(flat: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


def _fill(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parts of ``parameters``, in order, each of at most ``BUCKET_BYTES`` or of one parameter."""
    parts: list[list[Tensor]] = []
    room = 0
    for p in parameters:
        if not parts or p.nbytes > room:
            parts.append([])
            room = BUCKET_BYTES
        parts[-1].append(p)
        room -= p.nbytes
    return parts


def _split_by_kind(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[Any, list[Tensor]] = {}
    for p in parameters:
        kinds.setdefault((p.dtype, p.device), []).append(p)
    return list(kinds.values())
