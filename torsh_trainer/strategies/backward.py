"""The backward of a loss that enters the gradients with a factor: a part of a native engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ScaledBackward:
    """Adds ``factor`` times the gradient of a loss to the gradients.

    The factor enters as the gradient of the loss: a product would cost two operations. The last
    one is kept, for it rarely changes.
    """

    def __init__(self, device: torch.device) -> None:
        self._kept = (1.0, torch.ones((), device=device))

    def __call__(self, loss: Tensor, factor: float) -> None:
        """``loss.backward(gradient)`` for a 0-dim loss, without 9 us of argument handling."""
        gradient = self._gradient(factor, loss)
        if _ENGINE is None or type(loss) is not Tensor or loss.dim():
            loss.backward(gradient)
        else:
            _ENGINE((loss,), (gradient,), False, False, (), True, True)

    def _gradient(self, factor: float, loss: Tensor) -> Tensor:
        """``factor`` as a 0-dim tensor beside ``loss``."""
        kept, gradient = self._kept
        if kept != factor or gradient.dtype != loss.dtype:
            gradient = torch.full((), factor, dtype=loss.dtype, device=loss.device)
            self._kept = (factor, gradient)
        return gradient


_ENGINE: Callable[..., Any] | None = getattr(
    # torch's own name for what Tensor.backward ends in; a release without it takes the long way.
    getattr(torch.autograd.Variable, "_execution_engine", None),
    "run_backward",
    None,
)
