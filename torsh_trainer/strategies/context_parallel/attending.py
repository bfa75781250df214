"""What a forward on some tokens does otherwise: attention sees all, dropout draws for all."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.context_parallel.exchanges import (
    SCALED_DOT_PRODUCT,
    AttentionCall,
    Exchange,
    gather_columns,
)
from torsh_trainer.strategies.context_parallel.shares import TokenShare, fill_up
from torsh_trainer.strategies.tensor_parallel.layers import CUT


def read_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """A call of ``F.scaled_dot_product_attention``.

    Raises:
        Unsupported: it drops some of its weights, or its tokens are not in the usual place.
    """
    if dropout_p:
        raise Unsupported(
            f"mesh.cp: attention drops some of its weights (dropout {dropout_p:g}), and one "
            "process would draw for all pairs of tokens",
            fix="set the dropout of attention to 0 (model.dropout=0 for GPT, attn_pdrop or "
            "attention_dropout of a model of transformers)",
        )
    return AttentionCall(query, key, value, attn_mask, is_causal, scale, enable_gqa)


class InsteadOfAttention(TorchFunctionMode, abc.ABC):
    """Within, every attention is ``attend``'s.

    A mode sees every call but those within functions of torch that it has seen itself, as that of
    ``nn.MultiheadAttention``: these find the name replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[Any] = []
        self._depth = 0

    def __enter__(self) -> InsteadOfAttention:
        self._before.append(F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = self._replace
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        F.scaled_dot_product_attention = self._before.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._depth += 1
        try:
            if func is SCALED_DOT_PRODUCT:
                return self.attend(*args, **(kwargs or {}))
            return self.run(func, args, kwargs or {})
        finally:
            self._depth -= 1

    def _replace(self, *args: Any, **kwargs: Any) -> Any:
        return (self.attend if self._depth else SCALED_DOT_PRODUCT)(*args, **kwargs)

    @abc.abstractmethod
    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of ``F.scaled_dot_product_attention``."""

    @abc.abstractmethod
    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """In the place of ``func``, any other function of torch."""


class Attending(InsteadOfAttention):
    """Within, a forward of ``tokens`` in all, of which this process has its ``share``.

    ``exchange`` computes attention over ``comm``. One process would draw for ``drawn`` tokens, all
    but those that a sequence was filled up with. Between pairs of layers a process has its share
    ``layers`` of these tokens.
    """

    def __init__(
        self,
        exchange: Exchange,
        comm: Communicator,
        share: TokenShare,
        tokens: int,
        *,
        drawn: int,
        layers: TokenShare,
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._comm = comm
        self._share = share
        self._tokens = tokens
        self._drawn = drawn
        self._layers = layers
        self._own = tokens // share.size

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in DROPOUTS:
            return drop_out(func, args, kwargs, self._drop)
        return func(*args, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._share.size == 1:
            whole: Tensor = SCALED_DOT_PRODUCT(*args, **kwargs)
            return whole
        call = read_call(*args, **kwargs)
        lengths = call.query.shape[-2], call.key.shape[-2]
        if lengths != (self._own, self._own):
            raise Unsupported(
                f"mesh.cp: attention of {lengths[0]} queries over {lengths[1]} keys, where a "
                f"process has {self._own} tokens",
                fix="set mesh.cp=1 for a model that attends to something else than its tokens",
            )
        output = self._exchange(self._with_columns(call), self._comm, self._share)
        if hasattr(call.query, CUT):  # heads of this process's, if layers are cut as well
            setattr(output, CUT, (*getattr(call.query, CUT)[:2], None))
        return output

    def _with_columns(self, call: AttentionCall) -> AttentionCall:
        """``call`` with a mask of the keys of all."""
        mask = call.mask
        if mask is None or mask.shape[-1] == self._tokens:
            return call
        if mask.shape[-2] == 1:
            return call._replace(mask=gather_columns(mask, self._comm, self._share))
        raise Unsupported(
            f"mesh.cp: attention is given a mask of {list(mask.shape)}, which knows the own "
            f"{self._own} tokens of a process and not all {self._tokens}",
            fix="use is_causal=True, a mask of padding (batch, 1, 1, tokens), or set mesh.cp=1",
        )

    def _drop(self, input: Tensor, p: float) -> Tensor:
        """``input`` times what one process would draw for all tokens."""
        between = self._own // self._layers.size
        if input.dim() < 3 or input.shape[1] not in (self._own, between):
            raise _refuse_dropout(input)
        whole = F.dropout(input.new_ones((input.shape[0], self._drawn, *input.shape[2:])), p, True)
        own = self._share.take_own(fill_up(whole, 1, self._tokens, fill=1.0), 1)
        return input * (own if input.shape[1] == self._own else self._layers.take_own(own, 1))


DROPOUTS = frozenset([F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d,
                      F.dropout2d, F.dropout3d, torch.dropout, torch.dropout_])  # fmt: skip


def drop_out(func: Any, args: Any, kwargs: Any, drop: Callable[[Tensor, float], Tensor]) -> Tensor:
    """A dropout, of which ``drop`` does what is drawn.

    Raises:
        Unsupported: of a kind that nobody cuts yet.
    """
    output: Tensor
    if func in (torch.dropout, torch.dropout_):
        input, p, training = _of_kernel(*args, **kwargs)
        inplace = func is torch.dropout_
    else:
        input, p, training, inplace = _of_function(*args, **kwargs)
    if not training or not p:
        output = func(*args, **kwargs)
        return output
    if func not in (F.dropout, torch.dropout, torch.dropout_):
        raise Unsupported(
            f"mesh.cp: {func.__name__} draws for some of the tokens, where one process draws for "
            "all",
            fix="set it to 0, or use nn.Dropout",
        )
    output = drop(input, p)
    return input.copy_(output) if inplace else output


def _of_function(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def _of_kernel(input: Tensor, p: float, train: bool) -> tuple[Tensor, float, bool]:
    return input, p, train


def _refuse_dropout(input: Tensor) -> Unsupported:
    return Unsupported(
        f"mesh.cp: a dropout of {list(input.shape)}, whose dimension 1 is not that of the tokens, "
        "so that what one process would draw is not known",
        fix="set that dropout to 0, or let it see (batch, tokens, ...)",
    )
