"""Matrices of low rank instead of whole ones, by torch's own communication hook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from torsh_trainer.comm.compression.base import Compressing, at_least
from torsh_trainer.comm.compression.method import BucketPiece, Draw, Method, Started
from torsh_trainer.comm.compression.wire import Wire
from torsh_trainer.errors import ConfigError, ResourceError

_EPSILON = 1e-8
"""Keeps Gram-Schmidt from dividing by the norm of a gradient that is zero."""


@dataclass(frozen=True)
class PowerSGD(Compressing):
    """A matrix of gradients as a product of two with ``rank`` columns (Vogels et al. 2019).

    torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook. Parameters with one dimension, and
    those that would shrink by less than ``min_compression_rate``, travel as they are.
    ``warm_start`` begins each step with the factor of the last one. The residual is, as in the
    paper, what the mean over ranks does not hold of a rank's gradient.
    """

    name: ClassVar[str] = "powersgd"
    sums: ClassVar[bool] = True
    rank: int = 2
    min_compression_rate: float = 2.0
    warm_start: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "rank", 1)
        if not (self.min_compression_rate > 0.0 and math.isfinite(self.min_compression_rate)):
            raise ConfigError(
                f"compression.min_compression_rate={self.min_compression_rate} is not positive",
                fix="2 is the default: what would not halve travels as it is",
            )

    def method(self, wire: Wire, draw: Draw) -> Method:
        return LowRank(wire, draw, self)


class LowRank(Method):
    """Runs torch's hook on what it takes for a bucket of DDP, and keeps its factors by name."""

    hides_nonfinite = True  # one NaN would stay in the factors for good

    def __init__(self, wire: Wire, draw: Draw, knobs: PowerSGD) -> None:
        super().__init__(wire, draw)
        self._knobs = knobs
        self._state, self._hook = _torch_hook(knobs, wire.group)
        self._factors: dict[str, Tensor] = {}  # q of each parameter: its columns, times the rank

    def takes(self, shape: torch.Size) -> bool:
        if len(shape) < 2:
            return False
        rows, columns, rank = self._matrix(shape)
        return (rows + columns) * rank * self._knobs.min_compression_rate < rows * columns

    def start(self, pieces: Sequence[BucketPiece], *, unit: float, poison: Tensor) -> Started:
        # Ends before it returns: torch's hook waits within callbacks, of which a backend with few
        # threads must not have two at a time.
        if self.wire.any(poison.isnan()):
            return Started([], lambda: _spoil(pieces))
        bucket = _Bucket.of(pieces)
        key = bucket.index()
        self._prepare(key, pieces)
        result = self._hook(self._state, bucket).wait()
        self._remember(key, pieces)
        nbytes = sum(4 * (p + q) for p, q in self._layout(pieces).values())
        self.wire.count_sum(nbytes, size=self.wire.size)
        for piece, part in zip(
            pieces, result.split([p.value.numel() for p in pieces]), strict=True
        ):
            if piece.keeps:
                piece.value.sub_(part)
            piece.out.copy_(part)
        return Started([], _nothing)

    # -- torch's state, by the names of parameters -----------------------------------------------

    def _prepare(self, key: str, pieces: Sequence[BucketPiece]) -> None:
        import numpy as np  # torch's hook has imported it

        state = self._state
        state.rng = np.random.RandomState(self.draw.seed_of("factor", key) % 2**32)
        layout = self._layout(pieces)
        held = state.q_memory_dict.get(key)
        if held is not None and all(self._is_part(held, name) for name in layout):
            return
        state.p_memory_dict.pop(key, None)
        state.q_memory_dict.pop(key, None)
        if self._knobs.warm_start and all(name in self._factors for name in layout):
            like = pieces[0].value
            state.p_memory_dict[key] = like.new_empty(sum(size for size, _ in layout.values()))
            state.q_memory_dict[key] = torch.cat([self._factors[n].view(-1) for n in layout])

    def _remember(self, key: str, pieces: Sequence[BucketPiece]) -> None:
        state = self._state
        if self._knobs.warm_start:
            layout = self._layout(pieces)
            parts = state.q_memory_dict[key].split([size for _, size in layout.values()])
            for piece in pieces:
                part = parts[list(layout).index(piece.name)]
                self._factors[piece.name] = part.view(self._matrix(piece.shape)[1], -1)
        # The factors of a bucket that is laid out otherwise now.
        names = {piece.name for piece in pieces}
        for other in [k for k in state.q_memory_dict if k != key and names & {*k.split("\n")}]:
            del state.q_memory_dict[other], state.p_memory_dict[other]

    def _layout(self, pieces: Sequence[BucketPiece]) -> dict[str, tuple[int, int]]:
        """Name -> elements of its p and q, in torch's order: matrices of one shape together."""
        by_shape: dict[tuple[int, int], list[str]] = {}
        for piece in pieces:
            rows, columns, _ = self._matrix(piece.shape)
            by_shape.setdefault((rows, columns), []).append(piece.name)
        sizes = {}
        for (rows, columns), names in by_shape.items():
            rank = min(rows, columns, self._knobs.rank)
            sizes.update(dict.fromkeys(names, (rows * rank, columns * rank)))
        return sizes

    def _matrix(self, shape: torch.Size) -> tuple[int, int, int]:
        """Rows, columns and rank of the matrix that torch makes of a parameter."""
        rows, columns = shape[0], math.prod(shape[1:])
        return rows, columns, min(rows, columns, self._knobs.rank)

    def _is_part(self, held: Tensor, name: str) -> bool:
        factor = self._factors.get(name)
        mine = held.untyped_storage().data_ptr()
        return factor is not None and factor.untyped_storage().data_ptr() == mine

    def shared_state(self) -> dict[str, Tensor]:
        return dict(self._factors)

    def shared_template(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self._knobs.warm_start:
            return {}
        factors = {}
        for name, parameter in parameters.items():
            _, columns, rank = self._matrix(parameter.shape)
            factors[name] = parameter.new_zeros((columns, rank), dtype=torch.float32)
        return factors

    def load_shared_state(self, state: dict[str, Tensor]) -> None:
        # Copies: they take the place of torch's memory, of which these were views.
        self._factors = {name: factor.detach().clone() for name, factor in state.items()}


@dataclass(frozen=True)
class _Bucket:
    """What torch's hook asks of a dist.GradBucket, which only DDP can make."""

    flat: Tensor
    pieces: Sequence[BucketPiece] = field(repr=False)

    @classmethod
    def of(cls, pieces: Sequence[BucketPiece]) -> _Bucket:
        """A copy of the pieces' values."""
        return cls(torch.cat([piece.value for piece in pieces]), pieces)

    def buffer(self) -> Tensor:
        """All gradients, flat; the mean is written into it."""
        return self.flat

    def index(self) -> Any:
        """Any key will do: the names, which say what is in it however it is numbered."""
        return "\n".join(piece.name for piece in self.pieces)

    def gradients(self) -> list[Tensor]:
        """One tensor a parameter, views of the buffer."""
        parts = self.flat.split([piece.value.numel() for piece in self.pieces])
        return [part.view(p.shape) for part, p in zip(parts, self.pieces, strict=True)]

    def is_last(self) -> bool:
        """Never: steps are counted elsewhere."""
        return False


def _torch_hook(knobs: PowerSGD, group: Any) -> tuple[Any, Any]:
    try:  # it imports numpy, which nothing else in the core needs
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
            PowerSGDState,
            powerSGD_hook,
        )
    except ImportError as error:
        raise ResourceError(
            f"compression=powersgd is torch's own hook, and that needs {error.name}",
            fix=f"pip install {error.name}",
        ) from error
    state = PowerSGDState(
        process_group=group,
        matrix_approximation_rank=knobs.rank,
        start_powerSGD_iter=2,
        min_compression_rate=knobs.min_compression_rate,
        use_error_feedback=False,  # the residual is ours, by name
        warm_start=knobs.warm_start,
        orthogonalization_epsilon=_EPSILON,
    )
    state.iter = state.start_powerSGD_iter + 1  # whoever calls it has warmed up
    return state, powerSGD_hook


def _spoil(pieces: Sequence[BucketPiece]) -> None:
    pieces[0].out[:1].fill_(math.nan)


def _nothing() -> None:
    return None
