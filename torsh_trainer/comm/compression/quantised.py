"""Whole numbers of few bits instead of fp32: 8 or 4 bits an element, a scale for each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torsh_trainer.comm.compression.base import Compressing, at_least, choose
from torsh_trainer.comm.compression.method import Draw, Gathered, Method, Piece
from torsh_trainer.comm.compression.wire import Wire

Rounding = Literal["nearest", "stochastic"]
_SMALLEST = 1e-30
"""A block whose scale is below counts as zeros: its inverse would overflow."""


@dataclass(frozen=True)
class Int8(Compressing):
    """Every element as one of 255 levels between plus and minus the largest of its block.

    ``block_size`` elements share an fp32 scale. ``rounding`` is nearest, or stochastic: up or down
    with probabilities that make the expectation exact (Alistarh et al. 2017, "QSGD").
    """

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    block_size: int = 1024
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "block_size", 1)
        choose(self, "rounding", ("nearest", "stochastic"))

    def method(self, wire: Wire, draw: Draw) -> Method:
        return Quantised(wire, draw, self.format)

    @property
    def format(self) -> Format:
        """How elements become bytes."""
        return Format(self.bits, self.block_size, self.rounding)


@dataclass(frozen=True)
class Int4(Int8):
    """As ``Int8`` with 15 levels, two elements a byte."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    block_size: int = 256


@dataclass(frozen=True)
class Format:
    """Blocks of ``bits``-bit whole numbers with an fp32 scale each."""

    bits: int
    block_size: int
    rounding: Rounding

    @property
    def levels(self) -> int:
        """The largest whole number."""
        return 2 ** (self.bits - 1) - 1

    def payload_bytes(self, size: int) -> int:
        """Of ``size`` elements: scales, then the numbers."""
        return 4 * self._blocks(size) + (size if self.bits == 8 else -(-size // 2))

    def encode(self, value: Tensor, payload: Tensor, generator: torch.Generator | None) -> Tensor:
        """Writes ``value`` (fp32, 1-D) into ``payload`` (uint8); what ``decode`` will give."""
        blocks = self._in_blocks(value)
        scales = blocks.abs().amax(dim=1, keepdim=True).div_(self.levels)
        scales[scales < _SMALLEST] = 0.0
        numbers = blocks * torch.where(scales > 0.0, 1.0 / scales, scales)
        if self.rounding == "stochastic":
            numbers += torch.rand(numbers.shape, generator=generator, device=numbers.device)
            numbers.floor_()
        else:
            numbers.round_()
        numbers.clamp_(-self.levels, self.levels)
        self._write(scales, numbers, payload, value.numel())
        return (numbers * scales).view(-1)[: value.numel()]

    def decode(self, payload: Tensor, size: int) -> Tensor:
        """``size`` elements, fp32."""
        count = self._blocks(size)
        scales = payload[: 4 * count].view(torch.float32).unsqueeze(1)
        whole = _unpack(payload[4 * count :], size) if self.bits == 4 else payload[4 * count :]
        numbers = whole.view(torch.int8).float()
        padded = F.pad(numbers, (0, count * self._block(size) - size))
        return padded.view(count, -1).mul_(scales).view(-1)[:size]

    def _write(self, scales: Tensor, numbers: Tensor, payload: Tensor, size: int) -> None:
        count = scales.numel()
        payload[: 4 * count].view(torch.float32).copy_(scales.view(-1))
        # NaN is no whole number; its scale is NaN too, which is enough.
        whole = numbers.nan_to_num_(0.0).view(-1)[:size].to(torch.int8)
        if self.bits == 4:
            _pack(whole, payload[4 * count :])
        else:
            payload[4 * count :].view(torch.int8).copy_(whole)

    def _block(self, size: int) -> int:
        return min(self.block_size, max(1, size))

    def _blocks(self, size: int) -> int:
        return -(-size // self._block(size))

    def _in_blocks(self, value: Tensor) -> Tensor:
        block = self._block(value.numel())
        return F.pad(value, (0, -value.numel() % block)).view(-1, block)


def _pack(numbers: Tensor, out: Tensor) -> None:
    """Two numbers a byte: the first half of them in the low four bits, the second in the high."""
    half = out.numel()
    nibbles = numbers.view(torch.uint8) & 15
    out.copy_(nibbles[:half])
    out[: numbers.numel() - half] |= nibbles[half:] << 4


def _unpack(packed: Tensor, size: int) -> Tensor:
    """The inverse of ``_pack``: ``size`` bytes, the sign of four bits carried on."""
    nibbles = torch.cat((packed & 15, packed >> 4))[:size]
    return (nibbles ^ 8) - 8


class Quantised(Gathered):
    """Everybody's whole numbers and scales, gathered."""

    def __init__(self, wire: Wire, draw: Draw, form: Format) -> None:
        super().__init__(wire, draw)
        self._format = form

    def payload_bytes(self, size: int) -> int:
        return self._format.payload_bytes(size)

    def encode(self, piece: Piece, payload: Tensor) -> None:
        generator = None
        if self._format.rounding == "stochastic":
            device = piece.value.device
            generator = self.draw.generator(device, "round", piece.name, self.wire.rank)
        sent = self._format.encode(piece.value, payload, generator)
        if piece.keeps:
            piece.value.sub_(sent)

    def decode(self, piece: Piece, payloads: Sequence[Tensor], mean: Tensor) -> None:
        mean.zero_()
        for payload in payloads:
            mean.add_(self._format.decode(payload, mean.numel()), alpha=1.0 / self.wire.size)
