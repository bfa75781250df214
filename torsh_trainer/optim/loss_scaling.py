"""Loss scaling for fp16: the factor that keeps small gradients from vanishing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torsh_trainer.optim.precision import LossScaling

LARGEST = 3.4028234663852886e38
"""The largest float32: a scale does not grow beyond it."""


class LossScaler:
    """The scale of the loss, one Python number that every rank updates alike.

    Multiply the loss by ``scale`` before backward, divide gradients by it, and say after each step
    whether they were finite. With ``hysteresis`` 1 the scale is torch.amp.GradScaler's (which has
    no ``min_scale``). With more, the first ``hysteresis - 1`` overflows leave it alone, and a
    growth restores that patience, as in Megatron-LM. ``options.growth`` may let it grow otherwise.
    """

    def __init__(self, options: LossScaling) -> None:
        self.options = options
        self.scale = float(options.initial_scale if options.scale is None else options.scale)
        self._growth = options.growth
        self._good_steps = -self._growth.delay
        self._patience = options.hysteresis

    @property
    def divisor(self) -> float:
        """What gradients of a step are divided by, if they are finite."""
        return self._growth.divisor(self.scale, self._grown) if self._grows_next else self.scale

    def update(self, *, found_nonfinite: bool) -> None:
        """After each step: ``found_nonfinite`` says that it was skipped for its gradients."""
        if self.options.scale is not None:
            return
        if found_nonfinite:
            self._good_steps = -self._growth.delay
            self._patience -= 1
            if self._patience <= 0:
                self._fall()
            return
        if self._grows_next:
            self._good_steps = 0
            self._patience = self.options.hysteresis
            self.scale = self._grown
        else:
            self._good_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "scale": self.scale,
            "good_steps": self._good_steps,
            "patience": self._patience,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave; a fixed ``scale`` stays as configured."""
        if self.options.scale is None:
            self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
        self._patience = int(state["patience"])

    @property
    def _grows_next(self) -> bool:
        """A step without overflow would make the scale grow."""
        dynamic = self.options.scale is None
        return dynamic and self._good_steps + 1 >= self.options.growth_interval

    @property
    def _grown(self) -> float:
        grown = self.scale * self.options.growth_factor
        return grown if grown <= LARGEST else self.scale

    def _fall(self) -> None:
        # A scale that began below the floor is not raised by an overflow.
        floor = min(self.scale, self.options.min_scale)
        self.scale = max(self.scale * self.options.backoff_factor, floor)
