"""Gradients in half the bytes: every element rounded to fp16 or bf16, and added up so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torsh_trainer.comm.compression.base import Compressing, Memory
from torsh_trainer.comm.compression.method import BucketPiece, Draw, Method, Started
from torsh_trainer.comm.compression.wire import Wire, keep_for_stream


@dataclass(frozen=True, kw_only=True)
class FP16(Compressing):
    """Gradients are divided by the number of ranks, rounded to fp16 and summed in fp16.

    With ``memory=residual`` what is larger than fp16 holds is cut off there, and the rest follows;
    without, it becomes infinite, and shows as a gradient that is not finite.
    The rounding of the sum itself is nobody's residual.
    """

    name: ClassVar[str] = "fp16"
    sums: ClassVar[bool] = True
    memory: Memory = "none"

    def method(self, wire: Wire, draw: Draw) -> Method:
        return Rounded(wire, draw, torch.float16)


@dataclass(frozen=True, kw_only=True)
class BF16(Compressing):
    """As ``FP16`` in bf16: the range of fp32, with 8 bits of precision."""

    name: ClassVar[str] = "bf16"
    sums: ClassVar[bool] = True
    memory: Memory = "none"

    def method(self, wire: Wire, draw: Draw) -> Method:
        return Rounded(wire, draw, torch.bfloat16)


class Rounded(Method):
    """Rounds to ``dtype`` and sums."""

    def __init__(self, wire: Wire, draw: Draw, dtype: torch.dtype) -> None:
        super().__init__(wire, draw)
        self._dtype = dtype
        # A sum of so many values of this size stays finite.
        self._most = torch.finfo(dtype).max / wire.size

    def start(self, pieces: Sequence[BucketPiece], *, unit: float, poison: Tensor) -> Started:
        sizes = [piece.value.numel() for piece in pieces]
        sent = pieces[0].value.new_empty(sum(sizes), dtype=self._dtype)
        parts = sent.split(sizes)
        for piece, part in zip(pieces, parts, strict=True):
            self._round(piece, part)
        sent[0] = torch.where(poison.isnan(), poison, sent[0])
        work = self.wire.all_reduce(sent)

        def finish() -> None:
            keep_for_stream(sent)
            for piece, part in zip(pieces, parts, strict=True):
                piece.out.copy_(part)

        return Started([work], finish)

    def _round(self, piece: BucketPiece, part: Tensor) -> None:
        mine = piece.value / self.wire.size
        if self._dtype == torch.float16 and piece.keeps:
            mine.clamp_(-self._most, self._most)
        part.copy_(mine)
        if piece.keeps:
            piece.value.sub_(mine.copy_(part), alpha=self.wire.size)
