"""Attention in a ring: what other processes have is seen a piece at a time, and merged.

Liu et al. 2023, Ring Attention: the softmax of all keys follows from those of pieces and the
logarithms of their sums. Kept for the backward is what one process has, and nothing of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torsh_trainer.comm.base import Communicator
from torsh_trainer.strategies.context_parallel.shares import TokenShare

aten = torch.ops.aten


def attend_in_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    comm: Communicator,
    share: TokenShare,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """(..., heads, own tokens, n) each, of as many heads -> the same shape as ``value``."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    attended: Tensor = _Ring.apply(query, key, value, comm, share, is_causal, scale)
    return attended


class _Pair(NamedTuple):
    """Own queries of one chunk, and keys of one chunk: slices of the tokens at hand."""

    rows: slice
    columns: slice
    is_causal: bool


def _pairs(share: TokenShare, source: int, tokens: int, is_causal: bool) -> Iterator[_Pair]:
    """What this process's queries see of the keys of process ``source``."""
    own, theirs = share.chunks_of(share.rank), share.chunks_of(source)
    size = tokens // len(own)
    for i, mine in enumerate(own):
        for j, other in enumerate(theirs):
            if not is_causal or other <= mine:
                rows, columns = (slice(n * size, (n + 1) * size) for n in (i, j))
                yield _Pair(rows, columns, is_causal and other == mine)


def _pass_on(tensors: list[Tensor], comm: Communicator) -> list[Tensor]:
    """Those of the process before, in exchange for these, which go to the next one."""
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def send() -> None:
        for tensor in sent:
            comm.send(tensor, dst=after)

    def receive() -> None:
        for tensor in received:
            comm.recv(tensor, src=before)

    # Neighbours do the one and the other: nobody waits for a process that waits for it.
    for step in (send, receive) if comm.rank % 2 == 0 else (receive, send):
        step()
    return received


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        comm: Communicator,
        share: TokenShare,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        given = query, key, value
        query, key, value = query.detach(), key.detach(), value.detach()
        tokens = query.shape[-2]
        output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
        output = output.to(torch.promote_types(torch.float32, query.dtype))
        total = torch.full(query.shape[:-1], -math.inf, dtype=output.dtype, device=query.device)
        held = [key, value]
        for step in range(comm.size):
            source = (comm.rank - step) % comm.size
            for rows, columns, causal in _pairs(share, source, tokens, is_causal):
                part, sums = _attend(
                    query[..., rows, :],
                    held[0][..., columns, :],
                    held[1][..., columns, :],
                    causal,
                    scale,
                )
                before = total[..., rows]
                both = torch.logaddexp(before, sums.to(before.dtype))
                old, new = (before - both).exp(), (sums - both).exp()
                output[..., rows, :] *= old.unsqueeze(-1)
                output[..., rows, :] += part.to(output.dtype) * new.unsqueeze(-1)
                total[..., rows] = both
            if step < comm.size - 1:
                held = _pass_on(held, comm)
        output = output.to(query.dtype)
        ctx.save_for_backward(*given, output, total)
        ctx.comm, ctx.share, ctx.is_causal, ctx.scale = comm, share, is_causal, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        comm: Communicator = ctx.comm
        tokens, wide = query.shape[-2], total.dtype
        of_query = torch.zeros_like(query, dtype=wide)
        held = [key, value]
        sums = [torch.zeros_like(tensor, dtype=wide) for tensor in held]
        for step in range(comm.size):
            source = (comm.rank - step) % comm.size
            for rows, columns, causal in _pairs(ctx.share, source, tokens, ctx.is_causal):
                of_rows, *of_columns = _attend_backward(
                    gradient[..., rows, :],
                    query[..., rows, :],
                    held[0][..., columns, :],
                    held[1][..., columns, :],
                    output[..., rows, :],
                    total[..., rows].contiguous(),
                    causal,
                    ctx.scale,
                )
                of_query[..., rows, :] += of_rows
                for sum_, part in zip(sums, of_columns, strict=True):
                    sum_[..., columns, :] += part
            # Sums go once round with the keys that they are of, and are at home then.
            if step < comm.size - 1:
                held = _pass_on(held, comm)
            sums = _pass_on(sums, comm)
        own = (of_query, *sums)
        gradients = [g.to(t.dtype) for g, t in zip(own, (query, key, value), strict=True)]
        return *gradients, None, None, None, None


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    same = query.shape[-1] == value.shape[-1]
    return query.is_cpu and query.dim() == 4 and same and query.shape[-2] == key.shape[-2]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over ``key`` alone, and the logarithm of each row's sum of exponentials."""
    if _has_kernel(query, key, value):
        found: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return found
    scores = _scores(query, key, is_causal, scale)
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp().to(value.dtype) @ value, sums


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of these rows and columns alone, where ``output`` and ``total`` are of all columns."""
    if _has_kernel(query, key, value):
        found: tuple[Tensor, Tensor, Tensor] = (
            aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, query, key, value, output, total, 0.0, is_causal, scale=scale
            )
        )
        return found
    weights = (_scores(query, key, is_causal, scale) - total.unsqueeze(-1)).exp()
    wide = weights.dtype
    of_output, query_, key_, value_ = (t.to(wide) for t in (gradient, query, key, value))
    shares = (of_output * output.to(wide)).sum(-1, keepdim=True)
    of_scores = weights * (of_output @ value_.mT - shares) * scale
    return of_scores @ key_, of_scores.mT @ query_, weights.mT @ of_output


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    """In float32 or wider."""
    wide = torch.promote_types(torch.float32, query.dtype)
    scores = query.to(wide) @ key.to(wide).mT * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores
