"""Habits of DeepSpeed: how it rounds, and how its loss scale grows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torsh_trainer.emulation.base import Emulation, Growth


@dataclass(frozen=True)
class RoundedStart(Emulation):
    """Masters begin as the weights rounded to ``dtype``, in which forward and backward run."""

    dtype: torch.dtype

    @torch.no_grad()
    def change_model(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(parameter.to(self.dtype))


@dataclass(frozen=True)
class RoundedProducts(Emulation):
    """A torch.nn.Linear rounds its product before it adds the bias, as under stage 3.

    So it is where its input has three dimensions or more.
    """

    def change_model(self, model: nn.Module) -> None:
        for module in model.modules():
            if type(module) is nn.Linear and module.bias is not None:
                module.forward = functools.partial(  # type: ignore[method-assign]
                    _product_then_bias, module
                )


def _product_then_bias(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """A linear layer whose product is rounded to its dtype before the bias is added."""
    if inputs.dim() == 2:
        return functional.linear(inputs, linear.weight, linear.bias)
    return inputs.matmul(linear.weight.t()) + linear.bias


@dataclass(frozen=True)
class LateGrowth(Growth):
    """The scale of DeepSpeed's DynamicLossScaler.

    ``divides_by_grown`` divides the gradients of a step at which the scale grows by what it has
    grown to, so that this update is the smaller.
    """

    delay: int = 0
    divides_by_grown: bool = False

    def divisor(self, scale: float, grown: float) -> float:
        return grown if self.divides_by_grown else scale
