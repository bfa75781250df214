"""Precision as a value: which dtype parameters, compute and gradient reduction have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torsh_trainer.errors import ConfigError

DTypeName = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class LossScaling:
    """Loss scaling for fp16.

    ``scale`` fixes the factor; None scales dynamically: start at ``initial_scale``, multiply by
    ``backoff_factor`` after ``hysteresis`` overflows, by ``growth_factor`` after so many steps
    without one as ``growth_interval`` says, never below ``min_scale``. Defaults are those of
    torch.amp.GradScaler.

    Two knobs are DeepSpeed's ways: ``growth_delay`` are the steps by which the first growth after
    the start and after an overflow comes later, and ``divide_by_grown`` divides the gradients of a
    step at which the scale grows by what it has grown to, so that this update is the smaller.
    """

    scale: float | None = None
    initial_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    growth_delay: int = 0
    divide_by_grown: bool = False

    def __post_init__(self) -> None:
        if self.growth_factor <= 1.0 or not 0.0 < self.backoff_factor < 1.0:
            raise ConfigError(
                f"precision.loss_scaling needs growth_factor > 1 and 0 < backoff_factor < 1, "
                f"not {self.growth_factor} and {self.backoff_factor}",
                fix="the defaults are 2.0 and 0.5",
            )
        for name in ("initial_scale", "growth_interval", "hysteresis", "min_scale"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"precision.loss_scaling.{name}={getattr(self, name)} is not positive",
                    fix="leave it out to take the default",
                )
        if self.growth_delay < 0:
            raise ConfigError(
                f"precision.loss_scaling.growth_delay={self.growth_delay} is below 0",
                fix="0 is torch's way, 1 is DeepSpeed's",
            )


@dataclass(frozen=True)
class Precision:
    """How numbers are held while training.

    ``params`` fp32 with ``compute`` bf16 or fp16 is mixed precision: autocast picks the dtype of
    each operation. ``params`` bf16 is "true" bf16: the whole forward and backward run in bf16
    while a fp32 master copy is what the optimizer updates and a checkpoint holds; fp16 is the same,
    with loss scaling. ``reduce`` is the dtype in which gradients cross processes.

    Three knobs are for continuing what another engine began: ``gradients`` is the dtype in which
    they are held, to which a sum over micro-batches is rounded after each of them, before and after
    it crosses processes. ``rounded_start`` lets the masters begin as the weights rounded to
    ``params``, instead of the weights themselves. ``rounded_products`` lets a torch.nn.Linear round
    its product before it adds the bias, where its input has three dimensions or more.

    Raises:
        ConfigError: a combination that nobody could honour.
    """

    params: DTypeName = "fp32"
    compute: DTypeName = "fp32"
    reduce: DTypeName = "fp32"
    gradients: DTypeName = "fp32"
    rounded_start: bool = False
    rounded_products: bool = False
    loss_scaling: LossScaling = LossScaling()

    def __post_init__(self) -> None:
        if self.params not in ("fp32", self.compute):
            raise ConfigError(
                f"precision.params={self.params} computes in {self.params}, not in {self.compute}",
                fix=f"set precision.compute={self.params}, or take precision={self.params}_mixed",
            )
        if self.rounded_start and self.params == "fp32":
            raise ConfigError(
                "precision.rounded_start rounds to precision.params, and that is fp32",
                fix="set precision.params=bf16, or precision.rounded_start=false",
            )

    @property
    def autocast(self) -> bool:
        """Parameters stay fp32 and autocast picks the dtype of each operation."""
        return self.params == "fp32" and self.compute != "fp32"

    @property
    def scales_loss(self) -> bool:
        """The loss is scaled so that small gradients survive fp16."""
        return self.compute == "fp16"

    @property
    def name(self) -> str:
        """fp32, bf16-mixed, bf16-true, fp16-mixed or fp16-true."""
        if self.compute == "fp32":
            return "fp32"
        return f"{self.compute}-{'mixed' if self.autocast else 'true'}"
