"""What a script asks DeepSpeed's engine about its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torsh_trainer.dropin.zero.optimizer import EngineOptimizer
from torsh_trainer.dropin.zero.specification import Specification
from torsh_trainer.optim.precision import DTYPES


class SampleClock:
    """DeepSpeed's clock of samples a second; nothing is timed here."""

    def update_epoch_count(self) -> None:
        """An epoch has ended."""


_LOWERED = frozenset(
    ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "muon", "musgd")
)
"""Optimizers whose names DeepSpeed gives in lower case, however they are configured."""


class Settings:
    """The questions that only a configuration answers."""

    _specification: Specification
    optimizer: Any
    client_optimizer: Any
    training: bool

    tput_timer = SampleClock()

    def _block(self, name: str) -> Mapping[str, Any]:
        found = self._specification.content.get(name)
        return found if isinstance(found, Mapping) else {}

    def _dtype(self) -> torch.dtype:
        return DTYPES[self._specification.precision.params]

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration as DeepSpeed reads it."""
        return self._specification.content

    def train_batch_size(self) -> int:
        """Samples of a step, over all processes."""
        return self._specification.batch.batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a forward of one process."""
        return self._specification.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._specification.batch.accumulate

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three sizes: of a step, of a micro-batch, and how many make a step."""
        batch = self._specification.batch
        return batch.batch_size, batch.micro_batch_size, batch.accumulate

    def zero_optimization(self) -> bool:
        """ZeRO is on."""
        return self._specification.stage > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self._specification.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Stage 2 or 3."""
        return self._specification.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Stage 3."""
        return self._specification.stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Stage 3 may gather the model to save it."""
        block = self._block("zero_optimization")
        names = ("gather_16bit", "stage3_gather_16bit", "stage3_gather_fp16")
        return any(block.get(f"{name}_weights_on_model_save", False) for name in names)

    def fp16_enabled(self) -> bool:
        """The configuration says fp16."""
        return bool(self._block("fp16").get("enabled", False))

    def bfloat16_enabled(self) -> bool:
        """The configuration says bf16."""
        return bool(self._block("bf16").get("enabled", False))

    def gradient_clipping(self) -> float:
        """The bound on the norm; 0 for none."""
        return float(self._specification.clip.norm or 0.0)

    def dynamic_loss_scale(self) -> bool:
        """The loss scale follows overflows."""
        return self.fp16_enabled() and not self._block("fp16").get("loss_scale")

    def loss_scale(self) -> float:
        """The fixed scale of the configuration; 0 where it is dynamic."""
        return float(self._block("fp16").get("loss_scale", 0.0))

    def steps_per_print(self) -> int | None:
        """As configured."""
        return self._specification.content.get("steps_per_print")

    def optimizer_name(self) -> str | None:
        """The class of the script's own optimizer, or the configuration's, in DeepSpeed's words."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        name = self._block("optimizer").get("type")
        return name.lower() if name is not None and name.lower() in _LOWERED else name

    def optimizer_params(self) -> Mapping[str, Any] | None:
        """Its parameters."""
        return self._block("optimizer").get("params")

    def scheduler_name(self) -> str | None:
        """The scheduler of the configuration."""
        return self._block("scheduler").get("type")

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """Its parameters."""
        return self._block("scheduler").get("params")

    def wall_clock_breakdown(self) -> bool:
        """As configured; nothing is timed here."""
        return bool(self._specification.content.get("wall_clock_breakdown", False))

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the model's computation, and of the sum of gradients."""
        return self._dtype(), DTYPES[self._specification.precision.gradients]

    def get_lr(self) -> list[float]:
        """The rate of every group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum of SGD and RMSprop, else betas, of every group."""
        key = "momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas"
        return [group.get(key, 0.0) for group in self.optimizer.param_groups]

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by."""
        optimizer = self.optimizer
        return optimizer.cur_scale if isinstance(optimizer, EngineOptimizer) else 1.0
