"""A task of the user's as one stage runs it: its methods give what goes to the next one."""

from __future__ import annotations

from typing import Any

from torch import nn

from torsh_trainer.strategies.pipeline.crossing import Left
from torsh_trainer.tasks.base import Task


class StageTask(Task):
    """``task``, whose methods give a ``Left`` where a forward leaves its stage.

    It is caught here and not around an engine's contexts, which look at how a forward ends.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.sample_weight = task.sample_weight

    def build_model(self) -> nn.Module:
        return self._task.build_model()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return _until_left(self._task.forward, model, batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs if isinstance(outputs, Left) else self._task.loss(outputs, batch)

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        return _until_left(self._task.evaluate, model, batch)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return _until_left(self._task.predict, model, batch)


def _until_left(method: Any, model: nn.Module, batch: Any) -> Any:
    try:
        return method(model, batch)
    except Left as left:
        # Its traceback holds the frames of the forward, and all their tensors.
        return left.with_traceback(None)
