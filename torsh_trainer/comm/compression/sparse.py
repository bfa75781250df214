"""Few elements instead of all: the largest, random ones, or those above a threshold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torsh_trainer.comm.compression.base import Compressing, check_ratio
from torsh_trainer.comm.compression.method import BucketPiece, Draw, Gathered, Method, Started, into
from torsh_trainer.comm.compression.selection import above, largest
from torsh_trainer.comm.compression.wire import Wire, asks_host, keep_for_stream
from torsh_trainer.errors import ConfigError

_INT32 = 2**31


@dataclass(frozen=True)
class TopK(Compressing):
    """The share ``ratio`` of each parameter's elements that is largest in magnitude.

    Indices (int32) and values (fp32) are gathered, 8 bytes an element from every rank (Lin et al.
    2018, "Deep Gradient Compression", without its momentum correction).
    """

    name: ClassVar[str] = "topk"
    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio, usual="0.01")

    def method(self, wire: Wire, draw: Draw) -> Method:
        return Largest(wire, draw, self.ratio)


@dataclass(frozen=True)
class RandomK(Compressing):
    """The share ``ratio`` of each parameter's elements, drawn anew each step, alike on all ranks.

    No indices travel, and values are summed in the network. With ``memory=none`` they are scaled
    by ``1 / ratio``, which makes the mean unbiased (Stich et al. 2018, "Sparsified SGD with
    Memory"); with a residual they are sent as they are.
    """

    name: ClassVar[str] = "randomk"
    sums: ClassVar[bool] = True
    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio, usual="0.01")

    def method(self, wire: Wire, draw: Draw) -> Method:
        return Random(wire, draw, self.ratio)


@dataclass(frozen=True)
class Threshold(Compressing):
    """The elements whose magnitude is at least ``threshold``, in units of the gradient.

    As many as there are: each rank tells how many, then indices and values are gathered (Strom
    2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing").
    """

    name: ClassVar[str] = "threshold"
    threshold: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.threshold > 0.0 and math.isfinite(self.threshold)):
            raise ConfigError(
                f"compression.threshold={self.threshold} is not a positive number",
                fix="elements of at least this magnitude are sent: 0.001 is a start",
            )

    def method(self, wire: Wire, draw: Draw) -> Method:
        return AtLeast(wire, draw, self.threshold)


def count_kept(ratio: float, size: int) -> int:
    """How many of ``size`` elements the share ``ratio`` is: at least one."""
    return max(1, min(size, round(ratio * size)))


class Largest(Gathered):
    """Indices and values of the largest elements; unused places hold index 0 and value 0."""

    hides_nonfinite = True

    def __init__(self, wire: Wire, draw: Draw, ratio: float) -> None:
        super().__init__(wire, draw)
        self._ratio = ratio

    def payload_bytes(self, size: int) -> int:
        return count_kept(self._ratio, size) * (_index_type(size).itemsize + 4)

    def encode(self, piece: BucketPiece, payload: Tensor) -> None:
        value = piece.value
        count = count_kept(self._ratio, value.numel())
        places = largest(value, count, self.draw.generator(_CPU, "sample", piece.name))
        indices, values = self._parts(payload, value.numel())
        indices[: places.numel()] = places
        torch.index_select(value, 0, places, out=values[: places.numel()])
        if piece.keeps:
            value.index_fill_(0, places, 0.0)

    def decode(self, piece: BucketPiece, payloads: Sequence[Tensor], mean: Tensor) -> None:
        mean.zero_()
        for payload in payloads:
            indices, values = self._parts(payload, mean.numel())
            mean.index_add_(0, indices, values, alpha=1.0 / self.wire.size)

    def _parts(self, payload: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Values first, which any alignment of indices may follow."""
        count, index_type = count_kept(self._ratio, size), _index_type(size)
        if index_type == torch.int64:  # it has to begin at a multiple of eight
            return payload[: 8 * count].view(index_type), payload[8 * count :].view(torch.float32)
        return payload[4 * count :].view(index_type), payload[: 4 * count].view(torch.float32)


class Random(Method):
    """The same random elements on every rank, summed."""

    hides_nonfinite = True

    def __init__(self, wire: Wire, draw: Draw, ratio: float) -> None:
        super().__init__(wire, draw)
        self._ratio = ratio

    def start(self, pieces: Sequence[BucketPiece], *, unit: float, poison: Tensor) -> Started:
        drawn = _move_to([self._places(piece) for piece in pieces], pieces[0].value.device)
        sizes = [places.numel() for places in drawn]
        sent = pieces[0].value.new_empty(sum(sizes) + 1)
        sent[-1] = poison
        parts = sent[:-1].split(sizes)
        for piece, places, part in zip(pieces, drawn, parts, strict=True):
            torch.index_select(piece.value, 0, places, out=part)
            if piece.keeps:
                piece.value.index_fill_(0, places, 0.0)
            else:
                part.mul_(piece.value.numel() / places.numel())
        work = self.wire.all_reduce(sent)

        def finish() -> None:
            keep_for_stream(sent, *drawn)
            sent.div_(self.wire.size)
            for piece, places, part in zip(pieces, drawn, parts, strict=True):
                piece.out.zero_()
                piece.out.index_copy_(0, places, part.to(piece.out.dtype))
            pieces[0].out[:1] += sent[-1:]

        return Started([work], finish)

    def _places(self, piece: BucketPiece) -> Tensor:
        size = piece.value.numel()
        generator = self.draw.generator(_CPU, "places", piece.name)
        return subset(size, count_kept(self._ratio, size), generator)


def subset(size: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` of the numbers below ``size``, every such set equally likely; ascending.

    Each number is taken on its own by a probability a little above ``count / size``, by the gaps
    between those taken, which are geometric; of what comes out, some are dropped at random. It
    costs as much as the numbers taken, where a permutation costs as much as all.
    """
    if 4 * count >= size:
        return torch.randperm(size, generator=generator)[:count].sort().values
    p = min(0.5, (count + 6.0 * math.sqrt(count) + 9.0) / size)
    while True:
        most = math.ceil(size * p + 8.0 * math.sqrt(size * p) + 16.0)
        gaps = torch.empty(most, dtype=torch.float64).exponential_(generator=generator)
        places = gaps.div_(-math.log1p(-p)).floor_().add_(1.0).cumsum_(0).sub_(1.0)
        if places[-1] < size:
            continue  # the draws ended before the numbers did: as good as never
        places = places[places < size].long()
        if places.numel() >= count:
            kept_places = torch.randperm(places.numel(), generator=generator)[:count]
            return places[kept_places.sort().values]


class AtLeast(Method):
    """Indices and values of the elements at or above a threshold, as many as there are."""

    hides_nonfinite = True

    def __init__(self, wire: Wire, draw: Draw, threshold: float) -> None:
        super().__init__(wire, draw)
        self._threshold = threshold

    def start(self, pieces: Sequence[BucketPiece], *, unit: float, poison: Tensor) -> Started:
        found, counts = self._find_places([piece.value for piece in pieces], self._threshold * unit)
        values = [piece.value[places] for piece, places in zip(pieces, found, strict=True)]
        for piece, places in zip(pieces, found, strict=True):
            if piece.keeps:
                piece.value.index_fill_(0, places, 0.0)
        most = max(map(sum, counts))
        # Its own tensors by type: there is no size that all ranks know beforehand.
        index_type = _index_type(max(piece.value.numel() for piece in pieces))
        indices = found[0].new_zeros(most, dtype=index_type)
        sent = values[0].new_zeros(most + 1)
        mine = sum(counts[self.wire.rank])
        indices[:mine] = torch.cat(found)
        sent[:mine] = torch.cat(values)
        sent[-1] = poison
        works, rows = zip(self.wire.all_gather(indices), self.wire.all_gather(sent), strict=True)

        def finish() -> None:
            keep_for_stream(indices, sent, *rows)
            _add_up(pieces, counts, *rows)
            pieces[0].out[:1] += rows[1][:, -1].sum()

        return Started(list(works), finish)

    def _find_places(
        self, values: Sequence[Tensor], threshold: float
    ) -> tuple[list[Tensor], list[list[int]]]:
        """Places in each of ``values``, and how many of them every rank has."""
        if asks_host(values[0]):
            found = [above(value, threshold) for value in values]
            return found, self.wire.counts(torch.tensor([places.numel() for places in found]))
        # How many there are decides sizes, and is asked for once.
        sizes = [value.numel() for value in values]
        reaches = torch.cat(list(values)).abs_() >= threshold
        counts = self.wire.counts(torch.stack([part.sum() for part in reaches.split(sizes)]))
        mine = counts[self.wire.rank]
        places = torch.nonzero_static(reaches, size=sum(mine)).view(-1).split(mine)
        begins = [0, *itertools.accumulate(sizes[:-1])]
        return [part - begin for part, begin in zip(places, begins, strict=True)], counts


def _move_to(drawn: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Tensors of the CPU on ``device``, by one copy that nobody waits for."""
    if device.type == "cpu":
        return drawn
    joined = torch.cat(list(drawn))
    if device.type == "cuda":
        joined = joined.pin_memory()
    return joined.to(device, non_blocking=True).split([places.numel() for places in drawn])


def _add_up(
    pieces: Sequence[BucketPiece], counts: list[list[int]], indices: Tensor, values: Tensor
) -> None:
    """The mean of what ranks sent, whose ``counts[rank][piece]`` elements stand in a row."""
    begins = [0] * len(counts)
    for number, piece in enumerate(pieces):
        with into(piece.out) as mean:
            mean.zero_()
            for rank, begin in enumerate(begins):
                end = begin + counts[rank][number]
                part = indices[rank, begin:end], values[rank, begin:end]
                mean.index_add_(0, *part, alpha=1.0 / len(counts))
                begins[rank] = end


def _index_type(size: int) -> torch.dtype:
    return torch.int32 if size < _INT32 else torch.int64


_CPU = torch.device("cpu")
