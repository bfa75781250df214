"""Classification of whatever a model turns into one row of logits a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource, Mean, Task
from torsh_trainer.tasks.fit import check_fit


class Classification(Task):
    """Cross entropy over batches ``(inputs, labels)``: labels (batch,) int64, logits (batch,
    classes).

    ``model`` makes a new model. ``label_smoothing`` in [0, 1) applies to the training loss alone:
    the loss that evaluation reports is plain cross entropy, so that runs compare. Evaluation
    gives ``loss`` and ``accuracy`` (0 to 1); prediction gives the most likely class of every
    sample, by name where the data has ``classes``.

    Raises:
        ConfigError: ``label_smoothing`` is out of range.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: DataSource,
        optimizer: OptimizerSpec = OptimizerSpec(),
        *,
        label_smoothing: float = 0.0,
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise ConfigError(
                f"task.label_smoothing={label_smoothing} is out of range",
                fix="give a number from 0 up to, and not including, 1",
            )
        self.model = model
        self.data = data
        self.optimizer = optimizer
        self.label_smoothing = label_smoothing

    def build_model(self) -> nn.Module:
        return check_fit(self.model(), self.data)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.float(), batch[1], label_smoothing=self.label_smoothing)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Mean]:
        logits, labels = self.forward(model, batch), batch[1]
        return {
            "loss": Mean(F.cross_entropy(logits.float(), labels, reduction="sum"), len(labels)),
            "accuracy": Mean((logits.argmax(-1) == labels).sum(), len(labels)),
        }

    def predict(self, model: nn.Module, batch: Any) -> Tensor | list[str]:
        # A dataset to predict may have no labels: its batch is the inputs alone, or (inputs,).
        best = self.forward(model, batch if isinstance(batch, tuple | list) else (batch,)).argmax(
            -1
        )
        names = getattr(self.data, "classes", None)
        return best if names is None else [names[i] for i in best.tolist()]
