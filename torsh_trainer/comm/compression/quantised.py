"""Whole numbers of few bits instead of fp32: 8 or 4 bits an element, a scale for each block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torsh_trainer.comm.compression.base import Compressing, at_least, choose
from torsh_trainer.comm.compression.method import BucketPiece, Draw, Gathered, Method, chunks
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
        sent = torch.empty_like(value)
        for span, part in self._write_spans(value, payload, generator):
            sent[span] = part
        return sent

    def take(self, value: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        """As ``encode``; ``value`` keeps what was not sent."""
        for span, part in self._write_spans(value, payload, generator):
            value[span].sub_(part)

    def _write_spans(
        self, value: Tensor, payload: Tensor, generator: torch.Generator | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Writes the payload, and gives in turn what each span of it stands for."""
        size = value.numel()
        scales, packed = self._parts(payload, size)
        whole = packed if self.bits == 8 else packed.new_empty(size)
        for span, blocks in chunks(size, value.device, block=self._block(size)):
            scale = scales[blocks]
            rows = value[span].view(scale.numel(), -1)
            numbers = rows.abs()
            torch.amax(numbers, dim=1, out=scale)
            scale.div_(self.levels)
            scale.masked_fill_(scale < _SMALLEST, 0.0)
            inverse = torch.where(scale > 0.0, 1.0 / scale, scale)
            torch.mul(rows, inverse.unsqueeze(1), out=numbers)
            self._round(numbers, generator)
            # NaN is no whole number; its scale is NaN too, which is enough.
            numbers.clamp_(-self.levels, self.levels).nan_to_num_(0.0)
            whole[span].copy_(numbers.view(-1))
            yield span, numbers.mul_(scale.unsqueeze(1)).view(-1)
        if self.bits == 4:
            _pack(whole, packed.view(torch.uint8))

    def _round(self, numbers: Tensor, generator: torch.Generator | None) -> None:
        if self.rounding == "stochastic":
            numbers += torch.rand(numbers.shape, generator=generator, device=numbers.device)
            numbers.floor_()
        else:
            numbers.round_()

    def decode(self, payload: Tensor, size: int) -> Tensor:
        """``size`` elements, fp32."""
        values = payload.new_empty(size, dtype=torch.float32)
        self.decode_mean([payload], values)
        return values

    def decode_mean(self, payloads: Sequence[Tensor], mean: Tensor) -> None:
        """The mean of what ``payloads`` stand for, into ``mean`` (fp32, 1-D)."""
        size = mean.numel()
        parts = [self._parts(payload, size) for payload in payloads]
        scales = [scale / len(payloads) for scale, _ in parts]
        for span, blocks in chunks(size, mean.device, block=self._block(size)):
            rows = mean[span].view(blocks.stop - blocks.start, -1).zero_()
            for scale, (_, packed) in zip(scales, parts, strict=True):
                whole = packed[span] if self.bits == 8 else _unpack(packed, span)
                rows.addcmul_(whole.float().view(rows.shape), scale[blocks].unsqueeze(1))

    def _parts(self, payload: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Scales (fp32), and the numbers or what they are packed in (int8)."""
        end = 4 * self._blocks(size)
        return payload[:end].view(torch.float32), payload[end:].view(torch.int8)

    def _block(self, size: int) -> int:
        return min(self.block_size, max(1, size))

    def _blocks(self, size: int) -> int:
        return -(-size // self._block(size))


def _pack(numbers: Tensor, out: Tensor) -> None:
    """Two numbers a byte: the first half of them in the low four bits, the second in the high."""
    half = out.numel()
    nibbles = numbers.view(torch.uint8) & 15
    out.copy_(nibbles[:half])
    out[: numbers.numel() - half] |= nibbles[half:] << 4


def _unpack(packed: Tensor, span: slice) -> Tensor:
    """Those numbers that ``_pack`` was given."""
    half = packed.numel()
    low = packed[span.start : min(span.stop, half)]
    high = packed[max(0, span.start - half) : max(0, span.stop - half)]
    # A shift to the right carries the sign on.
    return torch.cat(((low << 4) >> 4, high >> 4))


class Quantised(Gathered):
    """Everybody's whole numbers and scales, gathered."""

    def __init__(self, wire: Wire, draw: Draw, form: Format) -> None:
        super().__init__(wire, draw)
        self._format = form

    def payload_bytes(self, size: int) -> int:
        return self._format.payload_bytes(size)

    def encode(self, piece: BucketPiece, payload: Tensor) -> None:
        generator = None
        if self._format.rounding == "stochastic":
            device = piece.value.device
            generator = self.draw.generator(device, "round", piece.name, self.wire.rank)
        write = self._format.take if piece.keeps else self._format.encode
        write(piece.value, payload, generator)

    def decode(self, piece: BucketPiece, payloads: Sequence[Tensor], mean: Tensor) -> None:
        self._format.decode_mean(payloads, mean)
