"""Does a model of transformers fit the data? Asked before the first step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.task import DataSource


def check_data(model: nn.Module, data: DataSource) -> None:
    """Holds what the data says of itself against the model: token numbers and lengths.

    Raises:
        ConfigError: a token number has no embedding, or a sample no positions; names the override.
    """
    config: Any = model.config
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    known = getattr(embedding, "num_embeddings", None)
    tokens = _said(data, "vocab_size", "largest_token", more=1)
    if known is not None and tokens is not None and tokens > known:
        raise ConfigError(
            f"the data has token numbers up to {tokens - 1}, and the model's vocabulary is {known}",
            fix=f"set ++model.overrides.vocab_size={tokens}, or take the tokenizer of the model",
        )
    positions, longest = positions_of(model), _said(data, "context", "longest")
    if positions is not None and longest is not None and longest > positions:
        knob = "max_length" if hasattr(data, "longest") else "context"
        raise ConfigError(
            f"the longest sample has {longest} tokens, and the model {positions} positions",
            fix=f"set data.{knob}={positions}, or give {config.model_type} more positions by "
            "model.overrides",
        )


def positions_of(model: nn.Module) -> int | None:
    """How many tokens a sequence may have; None where the model does not say."""
    config: Any = model.config
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        return None
    for name, module in model.named_modules():
        # RoBERTa and its kin begin to count behind the number of the padding token.
        positions = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
        if positions and module.padding_idx is not None and module.num_embeddings == found:
            return found - int(module.padding_idx) - 1
    return found


def _said(data: DataSource, stated: str, read: str, *, more: int = 0) -> int | None:
    """What the data states, or what was read of it and ``more``."""
    value = getattr(data, stated, None)
    if isinstance(value, int):
        return value
    value = getattr(data, read, None)
    return None if value is None else int(value) + more


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Makes sure that no text of a packed sample attends to another one, by looking at it do so.

    Raises:
        ConfigError: it does, or the model takes no ``position_ids``, or its attention cannot tell.
    """
    config: Any = model.config
    name = f"data.packing=true is refused for the model type {config.model_type}"
    fix = "set data.packing=false: samples are padded then"
    if config._attn_implementation not in ("eager", "sdpa"):
        raise ConfigError(
            f"data.packing=true is refused for model.attn_implementation="
            f"{config._attn_implementation}",
            fix="take sdpa or eager, or set data.packing=false",
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"{name}: it takes no position_ids", fix=fix)
    if next(model.parameters()).is_meta:
        return
    trains = model.training
    model.eval()
    try:
        whole = torch.arange(5)
        if torch.equal(_end_of(model, 1, whole), _end_of(model, 2, whole)):
            raise ConfigError(f"{name}: nobody can tell whether texts attend to others", fix=fix)
        packed = torch.tensor([0, 1, 2, 0, 1])
        if not torch.equal(_end_of(model, 1, packed), _end_of(model, 2, packed)):
            raise ConfigError(f"{name}: texts attend to those before them", fix=fix)
    finally:
        model.train(trains)


def _end_of(model: nn.Module, first: int, positions: Tensor) -> Tensor:
    """Logits of the last two of five tokens, whose first three are all ``first``."""
    tokens = torch.tensor([[first, first, first, 0, 1]])
    outputs = model(input_ids=tokens, position_ids=positions.unsqueeze(0))
    logits: Tensor = outputs.logits[0, 3:]
    return logits
