"""Losses of a language model of transformers from its hidden states, without its logits."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.tasks.chunked_loss import sum_of_losses
from torsh_trainer.tasks.huggingface.checks import ON_A_CPU


def sum_losses(model: nn.Module) -> None:
    """Has ``model`` sum losses, where its logits are one linear layer of its hidden states.

    Its forward then takes ``targets`` (batch, T), and the layer's too, as ``LanguageModel`` asks.
    A model that scales or caps its logits keeps them, which is found by trying a few tokens; so
    does one whose attention a CPU has not, with which it cannot be tried.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear or not _is_all(model, head):
        return
    # Methods of the instances: a copy of the model gets its own, and names stay as they are.
    head.forward = types.MethodType(_of_head, head)  # type: ignore[method-assign]
    model.forward = types.MethodType(_of_model, model)
    model.sums_losses = True  # type: ignore[assignment]
    model.vocab_size = head.out_features  # type: ignore[assignment]


def sums_losses_of(module: nn.Module) -> bool:
    """Whether ``module`` is the output layer of a model that ``sum_losses`` was told of."""
    return getattr(vars(module).get("forward"), "__func__", None) is _of_head


def _is_all(model: Any, head: nn.Linear) -> bool:
    tried = model.config._attn_implementation in ON_A_CPU and not head.weight.is_meta
    if model.base_model is model or not tried:
        return False
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            tokens = torch.arange(min(4, head.out_features), device=head.weight.device)[None]
            hidden = model.base_model(input_ids=tokens, use_cache=False)[0]
            logits = model(input_ids=tokens, use_cache=False).logits
            return bool(torch.equal(head(hidden), logits))
    finally:
        model.train(training)


def _of_model(self: Any, *args: Any, targets: Tensor | None = None, **kwargs: Any) -> Any:
    if targets is None:
        return type(self).forward(self, *args, **kwargs)
    return self.get_output_embeddings()(self.base_model(*args, **kwargs)[0], targets)


def _of_head(self: nn.Linear, input: Tensor, targets: Tensor | None = None) -> Tensor:
    if targets is None:
        return F.linear(input, self.weight, self.bias)
    return sum_of_losses(input, self.weight, targets, bias=self.bias)
