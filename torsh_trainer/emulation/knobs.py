"""The knobs by which a user asks for another engine's habits, where they are written in conf/.

Each class is a part of the one that the configuration names (``RunSpec``, ``Precision``, ...),
which inherits the knobs and knows as ``emulation`` what they ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from torsh_trainer.emulation.base import NONE, TORCHS_GROWTH, Emulation, Growth, combine
from torsh_trainer.emulation.common import PhantomStep, ZeroUnused
from torsh_trainer.emulation.deepspeed import LateGrowth, RoundedProducts, RoundedStart
from torsh_trainer.emulation.horovod import Sums
from torsh_trainer.errors import ConfigError, nearest

OPS = ("average", "sum")


@dataclass(frozen=True, kw_only=True)
class StartKnobs:
    """Of a run. ``phantom_lr`` asks for one step of the optimizers with gradients of zero, at that
    rate, before the first; ``phantom_state`` False forgets the optimizer's state of that step.
    """

    phantom_lr: float | None = None
    phantom_state: bool = True

    @property
    def emulation(self) -> Emulation:
        """What is done before the first step."""
        if self.phantom_lr is None:
            return NONE
        return PhantomStep(self.phantom_lr, keeps_state=self.phantom_state)

    @classmethod
    def among(cls, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """Those of these knobs that ``trainer``, values of the group of that name, has."""
        return {f.name: trainer[f.name] for f in fields(StartKnobs) if f.name in trainer}


@dataclass(frozen=True, kw_only=True)
class RoundingKnobs:
    """Of a precision. ``rounded_start`` lets the masters begin as the weights rounded to what
    forward and backward run in, instead of the weights themselves. ``rounded_products`` lets a
    torch.nn.Linear round its product before it adds the bias, where its input has three dimensions
    or more. ``low_outputs`` leaves what the model returns in what it runs in, instead of fp32: a
    loss of it is computed and rounded there.
    """

    rounded_start: bool = False
    rounded_products: bool = False
    low_outputs: bool = False

    def check_rounding(self, *, is_low: bool) -> None:
        """``is_low``: forward and backward run in something lower than fp32.

        Raises:
            ConfigError: there is nothing to round to.
        """
        if self.rounded_start and not is_low:
            raise ConfigError(
                "precision.rounded_start rounds to precision.params, and that is fp32",
                fix="set precision.params=bf16, or precision.rounded_start=false",
            )
        if self.low_outputs and not is_low:
            raise ConfigError(
                "precision.low_outputs leaves outputs in precision.params, and that is fp32",
                fix="set precision.params=bf16, or precision.low_outputs=false",
            )

    def outputs_in(self, params: torch.dtype) -> torch.dtype | None:
        """What outputs of a model that runs in ``params`` are cast to; None: they stay."""
        return None if params == torch.float32 or self.low_outputs else torch.float32

    def emulation_in(self, params: torch.dtype) -> Emulation:
        """What is done to a model whose forward and backward run in ``params``."""
        return combine(
            RoundedStart(params) if self.rounded_start else NONE,
            RoundedProducts() if self.rounded_products else NONE,
        )


@dataclass(frozen=True, kw_only=True)
class GrowthKnobs:
    """Of the scaling of a loss. ``growth_delay`` are the steps by which the first growth after the
    start and after an overflow comes later, and ``divide_by_grown`` divides the gradients of a step
    at which the scale grows by what it has grown to, so that this update is the smaller.
    """

    growth_delay: int = 0
    divide_by_grown: bool = False

    def __post_init__(self) -> None:
        if self.growth_delay < 0:
            raise ConfigError(
                f"precision.loss_scaling.growth_delay={self.growth_delay} is below 0",
                fix="0 is torch's way, 1 is DeepSpeed's",
            )

    @property
    def growth(self) -> Growth:
        """How the scale grows."""
        if not self.growth_delay and not self.divide_by_grown:
            return TORCHS_GROWTH
        return LateGrowth(self.growth_delay, self.divide_by_grown)


@dataclass(frozen=True, kw_only=True)
class UnusedKnobs:
    """Of a strategy. ``zero_unused`` gives parameters that a step does not reach gradients of zero,
    so that they decay and their momentum goes on.
    """

    zero_unused: bool = False

    @property
    def emulation(self) -> Emulation:
        """What is done with gradients."""
        return ZeroUnused() if self.zero_unused else NONE

    def check_unused(self, *, finds: bool) -> None:
        """``finds``: the strategy looks for parameters without a gradient, and allows them.

        Raises:
            ConfigError: it does not, and is to fill their gradients.
        """
        if self.zero_unused and not finds:
            raise ConfigError(
                "strategy.zero_unused does nothing where every parameter needs a gradient",
                fix="set strategy.find_unused_parameters=true as well",
            )


@dataclass(frozen=True, kw_only=True)
class SumKnobs(UnusedKnobs):
    """Of a strategy that can add gradients up. ``backward_passes_per_step`` sums that many backward
    passes instead of averaging them, and ``op`` sum adds gradients up over processes; both multiply
    the gradient.
    """

    backward_passes_per_step: int = 1
    op: Literal["average", "sum"] = "average"

    def __post_init__(self) -> None:
        if self.backward_passes_per_step < 1:
            raise ConfigError(
                f"strategy.backward_passes_per_step={self.backward_passes_per_step} is below 1",
                fix="give 1 for a plain mean",
            )
        if self.op not in OPS:
            raise ConfigError(f"strategy.op={self.op} is unknown", fix=nearest(self.op, OPS))

    @property
    def emulation(self) -> Emulation:
        """What is done with gradients."""
        averages = self.backward_passes_per_step == 1 and self.op == "average"
        sums = Sums(self.backward_passes_per_step, over_ranks=self.op == "sum")
        return combine(super().emulation, NONE if averages else sums)
