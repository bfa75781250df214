"""One bit an element: its sign, and a magnitude that many share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torsh_trainer.comm.compression.base import Compressing, at_least
from torsh_trainer.comm.compression.method import BucketPiece, Draw, Gathered, Method, chunks
from torsh_trainer.comm.compression.wire import Wire


@dataclass(frozen=True)
class SignSGD(Compressing):
    """The sign that most ranks see, times the mean magnitude (Bernstein et al. 2018).

    Every rank sends its signs, 8 a byte, and the mean magnitude of each parameter; where as many
    are for plus as for minus the result is 0. The magnitude lets learning rates keep their meaning.
    A rank's residual is against what it sent itself; a vote is biased all the same.
    """

    name: ClassVar[str] = "signsgd"

    def method(self, wire: Wire, draw: Draw) -> Method:
        return Vote(wire, draw)


@dataclass(frozen=True)
class OneBit(Compressing):
    """The sign of every element times the mean magnitude of its block, averaged over ranks.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; the scale is that of Karimireddy et
    al. 2019. Meant, as 1-bit Adam (Tang et al. 2021) is, to follow ``warmup_steps`` of plain
    training; Adam's second moment is not frozen by it.
    """

    name: ClassVar[str] = "onebit"
    block_size: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "block_size", 1)

    def method(self, wire: Wire, draw: Draw) -> Method:
        return Signs(wire, draw, self.block_size)


class Signs(Gathered):
    """Signs, and a scale for every block, gathered; the mean of what they stand for."""

    def __init__(self, wire: Wire, draw: Draw, block_size: int) -> None:
        super().__init__(wire, draw)
        self._block_size = block_size

    def payload_bytes(self, size: int) -> int:
        return 4 * self._blocks(size) + bytes_for_bits(size)

    def encode(self, piece: BucketPiece, payload: Tensor) -> None:
        value, size = piece.value, piece.value.numel()
        scales, packed = self._parts(payload, size)
        negative = value.new_empty(size, dtype=torch.bool)
        for span, blocks in chunks(size, value.device, block=self._block(size)):
            rows, scale = value[span].view(blocks.stop - blocks.start, -1), scales[blocks]
            torch.signbit(value[span], out=negative[span])
            torch.mean(rows.abs(), dim=1, out=scale)
            if piece.keeps:
                rows.sub_(torch.copysign(scale.unsqueeze(1), rows))
        pack(negative, packed)

    def decode(self, piece: BucketPiece, payloads: Sequence[Tensor], mean: Tensor) -> None:
        size = mean.numel()
        parts = [self._parts(payload, size) for payload in payloads]
        shares = [scales / self.wire.size for scales, _ in parts]
        for span, blocks in chunks(size, mean.device, block=self._block(size)):
            rows = mean[span].view(blocks.stop - blocks.start, -1).zero_()
            for share, (_, packed) in zip(shares, parts, strict=True):
                signs = unpack(packed, span).float().mul_(-2.0).add_(1.0)  # of 0 and 1
                rows.addcmul_(signs.view(rows.shape), share[blocks].unsqueeze(1))

    def _parts(self, payload: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Scales, and packed signs."""
        end = 4 * self._blocks(size)
        return payload[:end].view(torch.float32), payload[end:]

    def _block(self, size: int) -> int:
        return min(self._block_size, size)

    def _blocks(self, size: int) -> int:
        return -(-size // self._block(size))


class Vote(Gathered):
    """Signs, and one scale for a parameter: what most ranks say, times the mean of their scales."""

    def payload_bytes(self, size: int) -> int:
        return 4 + bytes_for_bits(size)

    def encode(self, piece: BucketPiece, payload: Tensor) -> None:
        value, size = piece.value, piece.value.numel()
        negative = value.new_empty(size, dtype=torch.bool)
        spans = [span for span, _ in chunks(size, value.device)]
        sums = []
        for span in spans:
            torch.signbit(value[span], out=negative[span])
            sums.append(value[span].abs().sum())
        scale = torch.stack(sums).sum() / size
        payload[:4].view(torch.float32).copy_(scale)
        pack(negative, payload[4:])
        if piece.keeps:
            for span in spans:
                value[span].sub_(torch.copysign(scale, value[span]))

    def decode(self, piece: BucketPiece, payloads: Sequence[Tensor], mean: Tensor) -> None:
        ranks = self.wire.size
        scales = torch.cat([payload[:4].view(torch.float32) for payload in payloads])
        scale = scales.sum() / ranks
        for span, _ in chunks(mean.numel(), mean.device):
            against = mean.new_zeros(span.stop - span.start, dtype=torch.int16)
            for payload in payloads:
                against += unpack(payload[4:], span)
            votes = against.mul_(-2).add_(ranks).sign_()
            torch.mul(votes, scale, out=mean[span])


def bytes_for_bits(size: int) -> int:
    """Of so many bits."""
    return -(-size // 8)


def pack(flags: Tensor, out: Tensor) -> None:
    """Eight flags a byte; bit b of byte j is flag ``b * len(out) + j``: no flag waits for another.

    Consecutive flags in one byte would need a sum over eight of them, several times as slow.
    """
    planes = flags.view(torch.uint8)
    if flags.numel() < 8 * out.numel():
        planes = F.pad(planes, (0, 8 * out.numel() - flags.numel()))
    planes = planes.view(8, -1)
    out.copy_(planes[0])
    for bit in range(1, 8):
        out |= planes[bit] << bit


def unpack(packed: Tensor, span: slice) -> Tensor:
    """Those flags that ``pack`` was given, as uint8."""
    size = packed.numel()
    planes = []
    for bit in range(span.start // size, -(-span.stop // size)):
        first, last = max(0, span.start - bit * size), min(size, span.stop - bit * size)
        planes.append((packed[first:last] >> bit) & 1)
    return planes[0] if len(planes) == 1 else torch.cat(planes)
