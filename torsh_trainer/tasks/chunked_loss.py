"""Cross entropy of an output layer without the logits of the whole batch.

Logits are made for a chunk of tokens at a time. Their gradients are computed at once, in the
forward, since the loss is a sum: backward only scales them. Held from forward to backward are the
gradients of the hidden states and of the weight, not a number for each token and each word.

``F.linear_cross_entropy`` of torch 2.13 is not used: without options it makes all logits, and with
them it rounds the loss itself to bf16, and torch.compile falls back at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""A target that does not count: padding, or text that is given and not to be learned."""

_CHUNK_BYTES = 2**27
"""Of a chunk's logits in fp32."""
_PAYS_FROM = 4
"""So many chunks of logits at least; below, whole logits cost little memory and are as fast."""


ScoreChunk = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the logits of a chunk, (rows, vocabulary), and its targets: the summed loss, and its
gradient by the logits in fp32, which may lie in their memory."""


def chunk_rows(vocabulary: int) -> int:
    """Tokens of a chunk: a multiple of 128, whose logits in fp32 take about 128 MiB."""
    return max(128, _CHUNK_BYTES // (4 * vocabulary) // 128 * 128)


def pays(tokens: int, vocabulary: int) -> bool:
    """Whether the loss of so many tokens at once is better computed in chunks."""
    return tokens >= _PAYS_FROM * chunk_rows(vocabulary)


def sum_of_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    words: int | None = None,
    rows: int | None = None,
    score: ScoreChunk | None = None,
) -> Tensor:
    """The summed cross entropy of ``F.linear(hidden, weight, bias)``, in fp32 and 0-dim.

    ``hidden`` is (..., width), ``weight`` (vocabulary, width), ``bias`` (vocabulary,), ``targets``
    (...) int64, where ``IGNORED`` does not count. ``words`` are the rows of ``weight`` that stand
    for a word: the others, at its end, have no part in the softmax. ``rows`` are the tokens of a
    chunk. ``score`` takes the place of the softmax over the rows of ``weight``, where other
    processes have others. The product is computed in autocast's dtype where that is on, else in
    ``hidden``'s.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    words = weight.shape[0] if words is None else words
    rows = chunk_rows(weight.shape[0]) if rows is None else rows
    total: Tensor = _SumOfLosses.apply(
        hidden.flatten(0, -2), weight, bias, targets.flatten(), dtype, words, rows, score
    )
    return total


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        words: int,
        rows: int,
        score: ScoreChunk | None,
    ) -> Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        inputs, factors = hidden.to(dtype), weight.to(dtype)
        offset = None if bias is None else bias.to(dtype)
        gradient = torch.empty_like(inputs) if of_hidden else None
        of_factors = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        of_offset = None
        if bias is not None and of_bias:
            of_offset = torch.zeros_like(bias, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, inputs.shape[0], rows):
                part, wanted = inputs[start : start + rows], targets[start : start + rows]
                logits = F.linear(part, factors, offset)
                if score is None:
                    loss, error = _loss_and_error(logits, wanted, words)
                else:
                    loss, error = score(logits, wanted)
                total += loss
                if of_hidden or of_weight or of_bias:
                    lower = error.to(dtype)
                    if gradient is not None:
                        torch.mm(lower, factors, out=gradient[start : start + rows])
                    if of_factors is not None:
                        of_factors += lower.t() @ part
                    if of_offset is not None:
                        of_offset += error.sum(0)
        ctx.save_for_backward(gradient, of_factors, of_offset)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if gradient is None else (gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None, None


def _loss_and_error(logits: Tensor, targets: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk, and its gradient by the logits, (rows, vocabulary) in fp32."""
    scores = logits.float()
    if words < scores.shape[1]:
        scores[:, words:] = -torch.inf
    counts = targets != IGNORED
    column = torch.where(counts, targets, 0).unsqueeze(1)
    scores -= scores.amax(1, keepdim=True)
    hit = scores.gather(1, column)
    scores.exp_()
    parts = scores.sum(1, keepdim=True)
    losses = (parts.log() - hit).squeeze(1)
    loss = torch.where(counts, losses, 0.0).sum()
    scores /= parts
    scores.scatter_add_(1, column, torch.full_like(hit, -1.0))
    scores.masked_fill_(~counts.unsqueeze(1), 0.0)
    return loss, scores
