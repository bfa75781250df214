"""Cross entropy of an output layer whose words are cut over processes, without whole logits.

As ``tasks.chunked_loss``, a chunk of tokens at a time. Three small sums over processes for each
chunk: the largest score, the sum of exponentials, and the score of the target, which one has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torsh_trainer.comm.base import Communicator
from torsh_trainer.strategies.tensor_parallel.functions import copy_to_parts
from torsh_trainer.tasks.chunked_loss import IGNORED, chunk_rows


def sum_of_losses_of_parts(
    hidden: Tensor, weight: Tensor, targets: Tensor, comm: Communicator, *, words: int
) -> Tensor:
    """The summed cross entropy, in fp32 and 0-dim, the same on all members.

    ``hidden`` is (..., width), the same on all; ``weight`` (vocabulary / members, width), this
    one's rows; ``targets`` (...) int64, where ``IGNORED`` does not count. ``words`` are the rows of
    the whole weight that stand for a word. Computed in the dtype that ``sum_of_losses`` takes.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    inputs = copy_to_parts(hidden.flatten(0, -2), comm)
    total: Tensor = _SumOfLosses.apply(inputs, weight, targets.flatten(), dtype, words, comm)
    return total


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        words: int,
        comm: Communicator,
    ) -> Tensor:
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        inputs, factors = hidden.to(dtype), weight.to(dtype)
        gradient = torch.empty_like(inputs) if of_hidden else None
        of_factors = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        rows = chunk_rows(weight.shape[0] * comm.size)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, inputs.shape[0], rows):
                part, wanted = inputs[start : start + rows], targets[start : start + rows]
                scores = F.linear(part, factors).float()
                total += _turn_into_error(scores, wanted, words, comm)
                lower = scores.to(dtype)
                if gradient is not None:
                    torch.mm(lower, factors, out=gradient[start : start + rows])
                if of_factors is not None:
                    of_factors += lower.t() @ part
        ctx.save_for_backward(gradient, of_factors)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if gradient is None else (gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


def _turn_into_error(scores: Tensor, targets: Tensor, words: int, comm: Communicator) -> Tensor:
    """The summed loss of a chunk; ``scores``, (rows, own words), become its gradient by logits."""
    own = scores.shape[1]
    first = comm.rank * own
    scores[:, max(0, words - first) :] = -torch.inf
    counts = targets != IGNORED
    place = torch.where(counts, targets, 0) - first
    mine = (place >= 0) & (place < own)
    column = torch.where(mine, place, 0).unsqueeze(1)
    largest = scores.amax(1, keepdim=True)
    comm.all_reduce(largest, op="max")
    scores -= largest
    hit = torch.where(mine.unsqueeze(1), scores.gather(1, column), 0.0)
    scores.exp_()
    both = torch.cat([scores.sum(1, keepdim=True), hit], 1)
    comm.all_reduce(both)
    parts, hit = both[:, :1], both[:, 1:]
    loss = torch.where(counts, (parts.log() - hit).squeeze(1), 0.0).sum()
    scores /= parts
    scores.scatter_add_(1, column, torch.where(mine.unsqueeze(1), -1.0, 0.0))
    scores.masked_fill_(~counts.unsqueeze(1), 0.0)
    return loss
