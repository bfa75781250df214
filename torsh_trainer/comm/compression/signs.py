"""One bit an element: its sign, and a magnitude that many share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torsh_trainer.comm.compression.base import Compressing, at_least
from torsh_trainer.comm.compression.method import Draw, Gathered, Method, Piece
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
        return Vote(wire, draw, None)


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
    """Signs and scales, gathered; the mean of what they stand for.

    ``block_size`` None is one scale for a parameter.
    """

    def __init__(self, wire: Wire, draw: Draw, block_size: int | None) -> None:
        super().__init__(wire, draw)
        self._block_size = block_size

    def payload_bytes(self, size: int) -> int:
        return 4 * self._blocks(size) + packed_bytes(size)

    def encode(self, piece: Piece, payload: Tensor) -> None:
        value, size = piece.value, piece.value.numel()
        count = self._blocks(size)
        padded = F.pad(value.abs(), (0, count * self._block(size) - size)).view(count, -1)
        scales = payload[: 4 * count].view(torch.float32)
        torch.mean(padded, dim=1, out=scales)
        if size < padded.numel():  # zeros that were added belong to nobody
            scales[-1] *= padded.shape[1] / (size - (count - 1) * padded.shape[1])
        pack(torch.signbit(value), payload[4 * count :])
        if piece.keeps:
            whole = self._whole(scales, size)
            value.sub_(torch.copysign(whole, value, out=whole))

    def decode(self, piece: Piece, payloads: Sequence[Tensor], mean: Tensor) -> None:
        mean.zero_()
        count = self._blocks(mean.numel())
        for payload in payloads:
            scales = payload[: 4 * count].view(torch.float32)
            negative = unpack(payload[4 * count :], mean.numel())
            signs = torch.where(negative, -1.0 / self.wire.size, 1.0 / self.wire.size)
            mean.addcmul_(self._whole(scales, mean.numel()), signs)

    def _whole(self, scales: Tensor, size: int) -> Tensor:
        """The scale of each element, without its sign."""
        return scales.unsqueeze(1).repeat(1, self._block(size)).view(-1)[:size]

    def _block(self, size: int) -> int:
        return size if self._block_size is None else min(self._block_size, size)

    def _blocks(self, size: int) -> int:
        return -(-size // self._block(size))


class Vote(Signs):
    """What most ranks say, times the mean of their scales."""

    def decode(self, piece: Piece, payloads: Sequence[Tensor], mean: Tensor) -> None:
        against = mean.new_zeros(mean.numel(), dtype=torch.int16)
        scale = mean.new_zeros(1)
        for payload in payloads:
            scale += payload[:4].view(torch.float32)
            against += unpack(payload[4:], mean.numel())
        votes = against.mul_(-2).add_(self.wire.size).sign_()
        torch.mul(votes, scale.div_(self.wire.size), out=mean)


def packed_bytes(size: int) -> int:
    """Of so many bits."""
    return -(-size // 8)


def pack(flags: Tensor, out: Tensor) -> None:
    """Eight flags a byte; bit b of byte j is flag ``b * len(out) + j``: no flag waits for another.

    Consecutive flags in one byte would need a sum over eight of them, several times as slow.
    """
    bits = F.pad(flags.view(torch.uint8), (0, 8 * out.numel() - flags.numel())).view(8, -1)
    out.copy_(bits[0])
    for b in range(1, 8):
        out |= bits[b] << b


def unpack(packed: Tensor, size: int) -> Tensor:
    """The inverse of ``pack``: ``size`` booleans."""
    planes = [(packed >> b) & 1 for b in range(8)]
    return torch.cat(planes)[:size].view(torch.bool)
