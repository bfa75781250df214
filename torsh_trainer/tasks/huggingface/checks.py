"""Does a model of transformers fit the data? Asked before the first step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import DataSource

ON_A_CPU = ("eager", "sdpa")
"""Kinds of attention that a model can be tried with where it is built."""


def check_data(model: nn.Module, data: DataSource) -> None:
    """Holds what the data says of itself against the model: token numbers and lengths.

    Raises:
        ConfigError: a token number has no embedding, or a sample no positions; names the override.
    """
    config: Any = model.config
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    known = getattr(embedding, "num_embeddings", None)
    tokens = _stated_value(data, "vocab_size", "largest_token", more=1)
    if known is not None and tokens is not None and tokens > known:
        raise ConfigError(
            f"the data has token numbers up to {tokens - 1}, and the model's vocabulary is {known}",
            fix=f"set ++model.overrides.vocab_size={tokens}, or take the tokenizer of the model",
        )
    positions, longest = positions_of(model), _stated_value(data, "context", "longest")
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


def _stated_value(data: DataSource, stated: str, read: str, *, more: int = 0) -> int | None:
    """What the data states, or what was read of it and ``more``."""
    value = getattr(data, stated, None)
    if isinstance(value, int):
        return value
    value = getattr(data, read, None)
    return None if value is None else int(value) + more


def check_causal(model: nn.Module) -> None:
    """Makes sure that no token sees those after it, by looking at what a last one changes.

    Raises:
        ConfigError: it does: then the next token could be read off.
    """
    config: Any = model.config
    if next(model.parameters()).is_meta or config._attn_implementation not in ON_A_CPU:
        return
    with _evaluation_mode(model):
        one, other = (_logits(model, [0, 1, 2, 0, last])[:4] for last in (1, 2))
    if not torch.equal(one, other):
        raise ConfigError(
            f"the model type {config.model_type} predicts a token that it has seen: its attention "
            "looks ahead",
            fix="set ++model.overrides.is_decoder=true where it has that, or take another model",
        )


def check_packing(model: nn.Module) -> None:
    """Makes sure that no text of a packed sample attends to another one, by looking at it do so.

    Raises:
        ConfigError: it does, or the model takes no ``position_ids``, or its attention cannot tell.
    """
    config: Any = model.config
    name = f"data.packing=true is refused for the model type {config.model_type}"
    fix = "set data.packing=false: samples are padded then"
    if config._attn_implementation not in ON_A_CPU:
        raise ConfigError(
            f"data.packing=true is refused for model.attn_implementation="
            f"{config._attn_implementation}",
            fix="take sdpa or eager, or set data.packing=false",
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"{name}: it takes no position_ids", fix=fix)
    if next(model.parameters()).is_meta:
        return

    def ends(positions: list[int]) -> list[Tensor]:
        texts = [[first] * 3 + [0, 1] for first in (1, 2)]
        return [_logits(model, text, position_ids=positions)[3:] for text in texts]

    with _evaluation_mode(model):
        if torch.equal(*ends([0, 1, 2, 3, 4])):
            raise ConfigError(f"{name}: nobody can tell whether texts attend to others", fix=fix)
        if not torch.equal(*ends([0, 1, 2, 0, 1])):
            raise ConfigError(f"{name}: texts attend to those before them", fix=fix)


def _logits(model: nn.Module, tokens: list[int], **more: list[int]) -> Tensor:
    """Logits of a few tokens: (tokens, vocabulary)."""
    inputs = {"input_ids": tokens, **more}
    outputs = model(**{name: torch.tensor([numbers]) for name, numbers in inputs.items()})
    logits: Tensor = outputs.logits[0]
    return logits


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    trains = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(trains)
