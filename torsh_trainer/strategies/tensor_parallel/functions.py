"""How an activation goes into a cut layer and comes out, with the gradient of one process.

The pairs of Megatron-LM (Shoeybi et al. 2019, section 3): what is copied forward is summed
backward, what is summed forward is copied backward. Gradients outside of cut layers are whole, and
the same on all members.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torsh_trainer.comm.base import Communicator


def copy_to_parts(tensor: Tensor, comm: Communicator) -> Tensor:
    """``tensor``, the same on all members, for each to use in part; its gradients are summed."""
    copied: Tensor = _Copy.apply(tensor, comm)
    return copied


def sum_of_parts(tensor: Tensor, comm: Communicator) -> Tensor:
    """The sum of all members' ``tensor``, on each of them."""
    total: Tensor = _Sum.apply(tensor, comm)
    return total


def gather_parts(tensor: Tensor, comm: Communicator) -> Tensor:
    """(..., n) -> (..., n * members): the last dimensions of all members, by rank."""
    gathered: Tensor = _Gather.apply(tensor, comm)
    return gathered


def split_to_parts(tensor: Tensor, comm: Communicator) -> Tensor:
    """(..., n * members) -> (..., n): this member's part of the last dimension."""
    own: Tensor = _Split.apply(tensor, comm)
    return own


def own_part(tensor: Tensor, comm: Communicator, dim: int = -1, parts: int = 1) -> Tensor:
    """This member's share of each of ``parts`` equal pieces of a dimension, one after the other."""
    pieces = [piece.chunk(comm.size, dim)[comm.rank] for piece in tensor.chunk(parts, dim)]
    return pieces[0] if parts == 1 else torch.cat(pieces, dim)


def _join(tensor: Tensor, comm: Communicator) -> Tensor:
    return torch.cat(comm.all_gather(tensor.contiguous()), -1)


def _sum(tensor: Tensor, comm: Communicator) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)  # others may hold the same memory
    comm.all_reduce(total)
    return total


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.comm), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator) -> Tensor:
        return _sum(tensor, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return _join(tensor, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return own_part(gradient, ctx.comm).contiguous(), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return own_part(tensor, comm).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _join(gradient, ctx.comm), None
