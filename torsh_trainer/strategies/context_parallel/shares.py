"""Which tokens of a sequence a process has, and how what processes have of it is put together.

Under a causal mask the last tokens cost the most. Balanced shares are of two chunks, the i-th and
the i-th from behind, so that all processes have as much to do (Dubey et al. 2024, The Llama 3 Herd
of Models, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def fill_up(tensor: Tensor, dim: int, tokens: int, *, fill: float) -> Tensor:
    """``tensor``, with so many tokens along ``dim``; those that it lacks are ``fill``."""
    lacks = tokens - tensor.shape[dim]
    if not lacks:
        return tensor
    shape = [lacks if d == dim else size for d, size in enumerate(tensor.shape)]
    return torch.cat([tensor, tensor.new_full(shape, fill)], dim)


@dataclass(frozen=True)
class TokenShare:
    """What process ``rank`` of ``size`` has of a sequence: two chunks of ``2 size`` where it is
    ``balanced``, else one of ``size``."""

    rank: int
    size: int
    balanced: bool

    @property
    def chunks(self) -> int:
        """Of how many equal chunks a sequence consists."""
        return self.size * 2 if self.balanced else self.size

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The numbers of the chunks that process ``rank`` has, ascending."""
        return (rank, self.chunks - 1 - rank) if self.balanced else (rank,)

    def take_own(self, whole: Tensor, dim: int) -> Tensor:
        """This process's tokens of a tensor whose tokens lie along ``dim``."""
        pieces = whole.chunk(self.chunks, dim)
        return torch.cat([pieces[i] for i in self.chunks_of(self.rank)], dim)

    def divide(self, whole: Tensor, dim: int) -> list[Tensor]:
        """The tokens of each process, by rank."""
        pieces = whole.chunk(self.chunks, dim)
        return [
            torch.cat([pieces[i] for i in self.chunks_of(rank)], dim).contiguous()
            for rank in range(self.size)
        ]

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The inverse of ``divide``."""
        each = len(self.chunks_of(0))
        pieces: list[Tensor] = [parts[0]] * self.chunks
        for rank, part in enumerate(parts):
            for i, piece in zip(self.chunks_of(rank), part.chunk(each, dim), strict=True):
                pieces[i] = piece
        return torch.cat(pieces, dim)

    def places(self, tokens: int, device: torch.device) -> Tensor:
        """int64: where this process's tokens stand in a sequence of so many."""
        return self.take_own(torch.arange(tokens, device=device), 0)
