"""Precision as a value: which dtype parameters, compute and gradient reduction have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from torsh_trainer.emulation import Emulation
from torsh_trainer.emulation.knobs import GrowthKnobs, RoundingKnobs
from torsh_trainer.errors import ConfigError

DTypeName = Literal["fp32", "bf16", "fp16"]
Products = Literal["highest", "high", "medium"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class LossScaling(GrowthKnobs):
    """Loss scaling for fp16.

    ``scale`` fixes the factor; None scales dynamically: start at ``initial_scale``, multiply by
    ``backoff_factor`` after ``hysteresis`` overflows, by ``growth_factor`` after so many steps
    without one as ``growth_interval`` says, never below ``min_scale``. Defaults are those of
    torch.amp.GradScaler. ``GrowthKnobs`` let it grow as another engine's.
    """

    scale: float | None = None
    initial_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0

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
        super().__post_init__()


@dataclass(frozen=True)
class Precision(RoundingKnobs):
    """How numbers are held while training.

    ``params`` fp32 with ``compute`` bf16 or fp16 is mixed precision: autocast picks the dtype of
    each operation. ``params`` bf16 is "true" bf16: the whole forward and backward run in bf16
    while a fp32 master copy is what the optimizer updates and a checkpoint holds; fp16 is the same,
    with loss scaling. ``reduce`` is the dtype in which gradients cross processes.

    ``gradients`` is the dtype in which they are held, to which a sum over micro-batches is rounded
    after each of them, before and after it crosses processes. ``RoundingKnobs`` round as another
    engine does.

    ``compute`` auto is settled once, when the run begins: bf16 by autocast on a GPU that computes
    in it, else fp32 (see ``numerics.settle``). ``matmul`` is how products of fp32 numbers are
    rounded, as in torch.set_float32_matmul_precision: highest keeps fp32, high is TF32 where the
    device has it, medium bf16; convolutions go with it. None leaves torch as it is set.

    Raises:
        ConfigError: a combination that nobody could honour.
    """

    params: DTypeName = "fp32"
    compute: DTypeName | Literal["auto"] = "fp32"
    reduce: DTypeName = "fp32"
    gradients: DTypeName = "fp32"
    matmul: Products | None = None
    loss_scaling: LossScaling = LossScaling()

    def __post_init__(self) -> None:
        if self.params not in ("fp32", self.compute):
            raise ConfigError(
                f"precision.params={self.params} computes in {self.params}, and precision.compute "
                f"is {self.compute}",
                fix=f"set precision.compute={self.params}, or take precision={self.params}_mixed",
            )
        self.check_rounding(is_low=self.params != "fp32")

    @property
    def emulation(self) -> Emulation:
        """What is done to a model as another engine does it."""
        return self.emulation_in(DTYPES[self.params])

    @property
    def is_auto(self) -> bool:
        """What it computes in follows from the device, and is not known yet."""
        return self.compute == "auto"

    @property
    def autocast(self) -> bool:
        """Parameters stay fp32 and autocast picks the dtype of each operation."""
        return self.params == "fp32" and self.compute in ("bf16", "fp16")

    @property
    def output_dtype(self) -> torch.dtype | None:
        """What the model's outputs are cast to; None leaves them as they are."""
        return self.outputs_in(DTYPES[self.params])

    @property
    def scales_loss(self) -> bool:
        """The loss is scaled so that small gradients survive fp16."""
        return self.compute == "fp16"

    @property
    def averages(self) -> bool:
        """Whether an engine that can do either averages gradients instead of summing them.

        In fp16 a loss that is divided by the number of processes would lose small gradients.
        """
        return self.scales_loss

    @property
    def name(self) -> str:
        """fp32, bf16-mixed, bf16-true, fp16-mixed or fp16-true; auto until that is settled."""
        if self.compute in ("fp32", "auto"):
            return self.compute
        return f"{self.compute}-{'mixed' if self.autocast else 'true'}"

    def like(self, other: Precision) -> Precision:
        """These knobs, with parameters, compute and loss scaling of ``other``."""
        scaling = other.loss_scaling
        return replace(self, params=other.params, compute=other.compute, loss_scaling=scaling)

    def with_name(self, name: str) -> Precision:
        """These knobs, with what ``name`` says of parameters and compute (see ``name``)."""
        low, _, kind = name.partition("-")
        compute = _NAMED[low]
        return replace(self, params=compute if kind == "true" else "fp32", compute=compute)


AUTO = Precision(compute="auto")
"""What a run computes in where nobody says it."""

_NAMED: dict[str, DTypeName] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def sum_dtype(dtype: torch.dtype, asked: torch.dtype) -> torch.dtype:
    """In what gradients of ``dtype`` are summed where ``precision.reduce`` is ``asked``.

    fp32 is that or wider; a complex number keeps its two parts.
    """
    if dtype.is_complex or asked is torch.float32:
        return torch.promote_types(dtype, torch.float32)
    return asked
