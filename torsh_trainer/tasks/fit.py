"""Does the model fit the data? Asked before the first step, in the words of the configuration."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import DataSource

# What the model states, what the data states, and how the two must compare.
_RULES: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    ("in_features", "in_features", operator.eq),
    ("in_channels", "in_channels", operator.eq),
    ("image_size", "image_size", operator.eq),
    ("num_classes", "num_classes", operator.ge),
    ("out_features", "num_classes", operator.ge),
    ("out_features", "num_targets", operator.eq),
    ("vocab_size", "vocab_size", operator.ge),
    ("context", "context", operator.ge),
)


def check_fit(model: nn.Module, data: DataSource) -> nn.Module:
    """``model``, once its sizes agree with the data's where both state them as attributes.

    Raises:
        ConfigError: they disagree; the fix names the override. Or it is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__}, which is no torch.nn.Module",
            fix="choose the task that it is for (model=hf: task=hf_lm or task=hf_classification)",
        )
    for name, fact, agrees in _RULES:
        has, wants = getattr(model, name, None), getattr(data, fact, None)
        if has is not None and wants is not None and not agrees(has, wants):
            raise ConfigError(
                f"the model has {name}={has}, but the data has {fact}={wants}",
                fix=f"set model.{name}={wants}",
                model=has,
                data=wants,
            )
    return model
