"""Weights of samples, as the user gives them, held against what they are for."""

from __future__ import annotations

import torch
from torch import Tensor

from torsh_trainer.data.splits import making_data
from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import Task


def sample_weights_of(task: Task, size: int, *, seed: int) -> Tensor:
    """The data source's weights of its ``size`` training samples, shape (size,), float64.

    Raises:
        ConfigError: there are none, or nothing can be drawn in proportion to them.
    """
    with making_data(seed):
        given = task.data.sample_weights()
    if given is None:
        raise ConfigError(
            "data.weighted=true, but the data source gives no sample weights",
            fix="define sample_weights() on it, or set data.weighted=false",
        )
    try:
        weights = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _weights_error(f"returned a {type(given).__name__}, which is no tensor") from error
    if weights.is_complex():
        raise _weights_error(f"has dtype {str(weights.dtype).removeprefix('torch.')}")
    if weights.dim() != 1:
        raise _weights_error(f"has shape {tuple(weights.shape)}")
    if len(weights) != size:
        raise _weights_error(f"has {len(weights)} weights for {size} training samples")
    weights = weights.detach().double().cpu()
    wrong = (~torch.isfinite(weights) | (weights < 0)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise _weights_error(f"gives sample {first} the weight {weights[first].item():g}")
    return drawable(weights, "sample_weights()")


def drawable(weights: Tensor, what: str) -> Tensor:
    """``weights``, where samples can be drawn in proportion to them.

    Raises:
        ConfigError: all of them are 0, or they add up to more than a number holds.
    """
    if weights.sum().isinf():
        raise ConfigError(
            f"{what} of the data source add up to more than a 64-bit number holds",
            fix="divide them all by the largest: only their proportions matter",
        )
    if not weights.sum() > 0:
        raise ConfigError(
            f"{what} of the data source are all 0, so no sample can be drawn",
            fix="give at least one training sample a positive weight",
        )
    return weights


def _weights_error(what: str) -> ConfigError:
    return ConfigError(
        f"sample_weights() of the data source {what}",
        fix="return one finite weight of 0 or more for each training sample, shape (len(train),)",
    )
