"""The running part of a compression: how the values of one bucket are sent and averaged."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torsh_trainer.comm.compression.wire import Wire, asks_host, keep_for_stream

_ALIGNED = 8
"""Bytes: every part of a payload begins where int64 may, so that it can be read as any type."""
_CHUNK = 1 << 16
"""Elements computed in one go on a CPU: what comes between stays in a core's cache."""


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """One parameter of a bucket.

    ``value`` is fp32, one-dimensional: the gradient and what was owed of earlier ones. A method
    leaves in it what it has not sent, unless ``keeps`` is false: then it may leave anything.
    ``out`` is the place in the bucket for the mean over ranks; where ``keeps`` is false it may be
    the same memory.
    """

    name: str
    shape: torch.Size
    value: Tensor
    out: Tensor
    keeps: bool


class Started(NamedTuple):
    """Collectives under way, and what turns their result into the mean."""

    works: Sequence[Any]
    finish: Callable[[], None]


class Draw:
    """Random numbers that are a function of (seed, step, parameter) and nothing else.

    So a run that goes on, or one with other buckets, draws what the undisturbed one drew.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.reduction = 0  # within the step

    def seed_of(self, *words: str | int) -> int:
        """63 bits from the seed, the step and ``words``."""
        text = repr((self.seed, self.step, self.reduction, *words)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def generator(self, device: torch.device, *words: str | int) -> torch.Generator:
        """A generator on ``device``; ranks that name the same words draw the same numbers."""
        return torch.Generator(device).manual_seed(self.seed_of(*words))


class Method(abc.ABC):
    """Sends and averages the pieces of a bucket; what it keeps of a bucket lies in the pieces."""

    hides_nonfinite: ClassVar[bool] = False
    """A gradient that is not finite would not show in what is sent, unless it is looked for."""

    def __init__(self, wire: Wire, draw: Draw) -> None:
        self.wire = wire
        self.draw = draw

    def takes(self, shape: torch.Size) -> bool:
        """Whether a parameter of that shape is worth the trouble."""
        return True

    @abc.abstractmethod
    def start(self, pieces: Sequence[BucketPiece], *, unit: float, poison: Tensor) -> Started:
        """Sends ``pieces`` and says how to end it; ranks call it for the same pieces.

        ``unit`` is what one stands for in these gradients (the loss scale). ``poison`` (fp32,
        0-dim, where the pieces are) is 0, or NaN where this rank's gradients are not finite (none
        of them is in its values then): some element of the mean must become NaN on every rank. To
        ask an accelerator for its value would be to wait for all that it was given to do.
        """

    def shared_state(self) -> dict[str, Tensor]:
        """What is the same on every rank and goes into a checkpoint, by parameter name."""
        return {}

    def shared_template(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``shared_state`` once each of ``parameters`` has been sent, for a checkpoint to fill."""
        return {}

    def load_shared_state(self, state: dict[str, Tensor]) -> None:  # noqa: B027 - few have any
        """Takes what ``shared_state`` gave; parameters that are not in it begin afresh."""


class Gathered(Method):
    """A method whose payloads cannot be added up: everybody receives everybody's.

    The size of a payload is a function of the number of elements, the same on every rank.
    """

    @abc.abstractmethod
    def payload_bytes(self, size: int) -> int:
        """Of a parameter with ``size`` elements."""

    @abc.abstractmethod
    def encode(self, piece: BucketPiece, payload: Tensor) -> None:
        """Writes what is sent of ``piece`` into ``payload`` (uint8)."""

    @abc.abstractmethod
    def decode(self, piece: BucketPiece, payloads: Sequence[Tensor], mean: Tensor) -> None:
        """The mean of what all ranks sent, by rank, into ``mean`` (fp32, uninitialised)."""

    def start(self, pieces: Sequence[BucketPiece], *, unit: float, poison: Tensor) -> Started:
        begins, end = [], _ALIGNED
        for piece in pieces:
            begins.append(end)
            end += _align_up(self.payload_bytes(piece.value.numel()))
        payload = pieces[0].value.new_zeros(end, dtype=torch.uint8)
        payload[:4].view(torch.float32).copy_(poison)
        spans = [
            slice(begin, begin + self.payload_bytes(piece.value.numel()))
            for begin, piece in zip(begins, pieces, strict=True)
        ]
        for piece, span in zip(pieces, spans, strict=True):
            self.encode(piece, payload[span])
        work, rows = self.wire.all_gather(payload)

        def finish() -> None:
            keep_for_stream(payload, rows)
            for piece, span in zip(pieces, spans, strict=True):
                with into(piece.out) as mean:
                    self.decode(piece, [row[span] for row in rows], mean)
            pieces[0].out[:1] += rows[:, :4].contiguous().view(torch.float32).sum()

        return Started([work], finish)


@contextlib.contextmanager
def into(out: Tensor) -> Iterator[Tensor]:
    """An fp32 tensor to compute in whose values end up in ``out``: itself where it is fp32."""
    mean = out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
    yield mean
    if mean is not out:
        out.copy_(mean)


def chunks(size: int, device: torch.device, *, block: int = 1) -> Iterator[tuple[slice, slice]]:
    """(elements, their blocks of ``block``) in turn; a last block that is not full comes alone.

    Every span of elements can so be viewed as ``[blocks, -1]`` without padding. A device that is
    no CPU takes all full blocks at once.
    """
    full = size - size % block
    step = max(1, _CHUNK // block) * block if device.type == "cpu" else max(1, full)
    for begin in range(0, full, step):
        end = min(begin + step, full)
        yield slice(begin, end), slice(begin // block, end // block)
    if full < size:
        yield slice(full, size), slice(full // block, full // block + 1)


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all elements are, 0-dim: one pass that writes nothing, by sums or by norms.

    A CPU is quicker at sums; elsewhere all tensors are read in one go.
    """
    if asks_host(tensors[0]):
        found = [tensor.sum(dtype=torch.float32) for tensor in tensors]
    else:
        found = list(torch._foreach_norm(list(tensors), math.inf, dtype=torch.float32))
    return torch.stack(found).isfinite().all()


def _align_up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
