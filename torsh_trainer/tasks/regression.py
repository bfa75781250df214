"""Regression of one number, or several, for each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource, Mean, Task
from torsh_trainer.tasks.fit import check_fit

_CRITERIA: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "mae": F.l1_loss}


class Regression(Task):
    """Mean squared or absolute error over batches ``(inputs, targets)``: targets (batch, numbers)
    or (batch,), model outputs alike or with a last dimension of 1.

    Evaluation gives ``loss``, ``mse`` and ``mae``, each a mean over samples and their numbers.

    Raises:
        ConfigError: ``criterion`` is unknown, or outputs and targets differ in shape.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: DataSource,
        optimizer: OptimizerSpec = OptimizerSpec(),
        *,
        criterion: Literal["mse", "mae"] = "mse",
    ) -> None:
        if criterion not in _CRITERIA:
            raise ConfigError(f"task.criterion={criterion} is unknown", fix="choose mse or mae")
        self.model = model
        self.data = data
        self.optimizer = optimizer
        self.criterion = criterion

    def build_model(self) -> nn.Module:
        return check_fit(self.model(), self.data)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return _CRITERIA[self.criterion](*_align(outputs, batch[1]))

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Mean]:
        outputs, targets = _align(self.forward(model, batch), batch[1])
        samples = len(targets)
        means = {
            name: Mean(criterion(outputs, targets) * samples, samples)
            for name, criterion in _CRITERIA.items()
        }
        return {"loss": means[self.criterion], **means}

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        return self.forward(model, batch if isinstance(batch, tuple | list) else (batch,))


def _align(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float32 and of one shape: (n, 1) against (n,) would broadcast to all pairs."""
    if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise ConfigError(
            f"the model's outputs have shape {tuple(outputs.shape)}, the targets "
            f"{tuple(targets.shape)}",
            fix="set model.out_features to the number of targets",
        )
    return outputs.float(), targets.float()
