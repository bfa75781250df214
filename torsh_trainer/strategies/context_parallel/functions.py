"""How tokens of other processes come to one, with the gradient of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torsh_trainer.comm.base import Communicator
from torsh_trainer.strategies.context_parallel.shares import TokenShare


def gather_tokens(tensor: Tensor, comm: Communicator, share: TokenShare, dim: int) -> Tensor:
    """All members' tokens along ``dim``, in their order, for each member to use for its own: their
    gradients are summed."""
    whole: Tensor = _Gather.apply(tensor, comm, share, dim, True)
    return whole


def join_tokens(tensor: Tensor, comm: Communicator, share: TokenShare, dim: int) -> Tensor:
    """As ``gather_tokens``, for all members to do the same with: their gradients are the same."""
    whole: Tensor = _Gather.apply(tensor, comm, share, dim, False)
    return whole


def scatter_sum(tensor: Tensor, comm: Communicator, share: TokenShare, dim: int) -> Tensor:
    """This member's tokens, along ``dim``, of the sum of all members' ``tensor``."""
    own: Tensor = _Scatter.apply(tensor, comm, share, dim)
    return own


def split_tokens(tensor: Tensor, comm: Communicator, share: TokenShare, dim: int) -> Tensor:
    """This member's tokens, along ``dim``, of what is the same on all members."""
    own: Tensor = _Split.apply(tensor, comm, share, dim)
    return own


def tokens_to_heads(tensor: Tensor, comm: Communicator, share: TokenShare) -> Tensor:
    """(..., heads, own tokens, n) -> (..., heads / members, all tokens, n)."""
    swapped: Tensor = _Swap.apply(tensor, comm, share, True)
    return swapped


def heads_to_tokens(tensor: Tensor, comm: Communicator, share: TokenShare) -> Tensor:
    """The inverse of ``tokens_to_heads``."""
    swapped: Tensor = _Swap.apply(tensor, comm, share, False)
    return swapped


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, comm: Communicator, share: TokenShare, dim: int, sums: bool
    ) -> Tensor:
        ctx.comm, ctx.share, ctx.dim, ctx.sums = comm, share, dim, sums
        return _join_all(tensor.detach(), comm, share, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        parts = ctx.share.divide(gradient, ctx.dim)
        own = parts[ctx.comm.rank]
        if ctx.sums:
            own = torch.empty_like(own)
            ctx.comm.reduce_scatter(own, parts)
        return own, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, comm: Communicator, share: TokenShare, dim: int
    ) -> Tensor:
        ctx.comm, ctx.share, ctx.dim = comm, share, dim
        parts = share.divide(tensor.detach(), dim)
        own = torch.empty_like(parts[comm.rank])
        comm.reduce_scatter(own, parts)
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _join_all(gradient, ctx.comm, ctx.share, ctx.dim), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, comm: Communicator, share: TokenShare, dim: int
    ) -> Tensor:
        ctx.comm, ctx.share, ctx.dim = comm, share, dim
        return share.take_own(tensor.detach(), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _join_all(gradient, ctx.comm, ctx.share, ctx.dim), None, None, None


def _join_all(tensor: Tensor, comm: Communicator, share: TokenShare, dim: int) -> Tensor:
    return share.join(comm.all_gather(tensor.contiguous()), dim)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, comm: Communicator, share: TokenShare, to_heads: bool
    ) -> Tensor:
        ctx.comm, ctx.share, ctx.to_heads = comm, share, to_heads
        return _swap(tensor.detach(), comm, share, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(gradient, ctx.comm, ctx.share, not ctx.to_heads), None, None, None


def _swap(tensor: Tensor, comm: Communicator, share: TokenShare, to_heads: bool) -> Tensor:
    if to_heads:
        sent = [part.contiguous() for part in tensor.chunk(comm.size, -3)]
    else:
        sent = share.divide(tensor, -2)
    received = [torch.empty_like(part) for part in sent]
    comm.all_to_all(received, sent)
    return share.join(received, -2) if to_heads else torch.cat(received, -3)
