"""Attention over all tokens, of which each process has its own: three ways of exchanging them.

A mask's rows are the queries of this process, its columns the keys of all, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.context_parallel.functions import (
    gather_tokens,
    heads_to_tokens,
    tokens_to_heads,
)
from torsh_trainer.strategies.context_parallel.ring import attend_in_ring
from torsh_trainer.strategies.context_parallel.shares import TokenShare

SCALED_DOT_PRODUCT = torch._C._nn.scaled_dot_product_attention
"""As torch has it, whoever has put something in its place in ``torch.nn.functional``."""


class AttentionCall(NamedTuple):
    """A call of ``F.scaled_dot_product_attention``, on this process's tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    gqa: bool


Exchange = Callable[[AttentionCall, Communicator, TokenShare], Tensor]


def attend_gathered(call: AttentionCall, comm: Communicator, share: TokenShare) -> Tensor:
    """Each process gathers all keys and values, for its own queries."""
    if call.key.shape == call.value.shape:  # in one message
        both = torch.stack([call.key, call.value])
        key, value = gather_tokens(both, comm, share, both.dim() - 2).unbind(0)
    else:
        key, value = (gather_tokens(t, comm, share, t.dim() - 2) for t in (call.key, call.value))
    more: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.gqa}
    if not call.is_causal:
        return SCALED_DOT_PRODUCT(call.query, key, value, call.mask, **more)
    own = share.chunks_of(share.rank)
    outputs = []
    for chunk, query in zip(own, call.query.chunk(len(own), -2), strict=True):
        size = query.shape[-2]
        seen = (chunk + 1) * size
        rows = torch.arange(seen - size, seen, device=query.device)
        mask = torch.arange(seen, device=query.device) <= rows.unsqueeze(1)
        seen_keys, seen_values = key[..., :seen, :], value[..., :seen, :]
        outputs.append(
            SCALED_DOT_PRODUCT(query, seen_keys, seen_values, mask, **more)
            if chunk
            else SCALED_DOT_PRODUCT(query, seen_keys, seen_values, is_causal=True, **more)
        )
    return torch.cat(outputs, -2)


def attend_by_heads(call: AttentionCall, comm: Communicator, share: TokenShare) -> Tensor:
    """Each process gets all tokens of its share of the heads (Jacobs et al. 2023, Ulysses).

    Raises:
        ConfigError: the heads do not divide.
    """
    query, key, value, mask = call.query, call.key, call.value, call.mask
    heads = query.shape[-3]
    if heads % comm.size:
        raise ConfigError(
            f"strategy.context_exchange=alltoall gives each of mesh.cp={comm.size} processes some "
            f"of the heads, and {heads} do not divide",
            fix="use strategy.context_exchange=gather, which takes any number of heads",
            heads=heads,
        )
    of_keys, gqa = key.shape[-3], call.gqa
    if of_keys % comm.size:  # fewer than processes: each gets those of its queries
        key, value = (t.repeat_interleave(heads // of_keys, -3) for t in (key, value))
        gqa = False
    query, key, value = (tokens_to_heads(t, comm, share) for t in (query, key, value))
    if mask is not None:
        mask = _gather_mask(mask, comm, share, mask.dim() - 2)
        if mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.chunk(comm.size, -3)[comm.rank]
    attended = SCALED_DOT_PRODUCT(
        query, key, value, mask, is_causal=call.is_causal, scale=call.scale, enable_gqa=gqa
    )
    return heads_to_tokens(attended, comm, share)


def _gather_mask(mask: Tensor, comm: Communicator, share: TokenShare, dim: int) -> Tensor:
    sent = mask.to(torch.uint8) if mask.dtype == torch.bool else mask  # no backend sends the former
    return gather_tokens(sent, comm, share, dim).to(mask.dtype)


def gather_columns(mask: Tensor, comm: Communicator, share: TokenShare) -> Tensor:
    """(..., 1, own tokens) -> (..., 1, all tokens): which keys are seen by all queries."""
    return _gather_mask(mask, comm, share, mask.dim() - 1)


def attend_around(call: AttentionCall, comm: Communicator, share: TokenShare) -> Tensor:
    """Keys and values go round, and each process puts together what it has seen.

    Raises:
        ConfigError: there is a mask other than a causal one.
    """
    if call.mask is not None:
        raise ConfigError(
            "strategy.context_exchange=ring knows causal masks and none, and the model gives a "
            "mask (of padding, or of packed texts)",
            fix="use strategy.context_exchange=gather",
        )
    key, value = call.key, call.value
    if call.query.shape[-3] != key.shape[-3]:
        times = call.query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(times, -3) for t in (key, value))
    return attend_in_ring(
        call.query, key, value, comm, share, is_causal=call.is_causal, scale=call.scale
    )


EXCHANGES: Mapping[str, Exchange] = {
    "gather": attend_gathered,
    "ring": attend_around,
    "alltoall": attend_by_heads,
}
"""By the name that ``strategy.context_exchange`` has for them."""
