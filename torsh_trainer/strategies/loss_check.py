"""Losses that are no mean over the weight of a batch: how it is cut would change the result.

An engine weighs the losses of micro-batches by ``Task.weight``. A sum over samples, or a mean over
something else, would train with other gradients on another number of processes, without an error.
"""

from __future__ import annotations

import logging

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torsh_trainer.data.batch import MicroBatch
from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import Task

log = logging.getLogger(__name__)
_SUM = 2
"""``reduction="sum"`` as torch's kernels number it."""


class LossCheck:
    """Looks at the losses that it is given, of the first micro-batches and then ever more rarely.

    It knows torch's losses by what they keep for their backward, where the loss of the task is one
    of them as it is; of what is computed from several parts it says nothing.
    """

    def __init__(self) -> None:
        self._is_first = True

    def check(self, loss: Tensor, micro: MicroBatch, total_weight: float, task: Task) -> None:
        """``loss`` is that of ``micro``, before its backward; ``total_weight`` that of the step.

        Where the step has no other micro-batch, it is right as it is, and the log tells what would
        change with a second one.

        Raises:
            ConfigError: it is no mean over ``task.weight``, and the step has other micro-batches.
        """
        is_first, self._is_first = self._is_first, False
        if not micro.weight or not isinstance(loss, Tensor):
            return
        error = explain_no_mean(loss, task)
        if error is None:
            return
        if micro.weight < total_weight:
            raise error
        if is_first:
            log.warning("with several micro-batches a step this would be refused: %s", error)


def explain_no_mean(loss: Tensor, task: Task) -> ConfigError | None:
    """Why ``loss`` is no mean over ``task.weight``; None where nothing says so."""
    node = loss.grad_fn
    name = type(node).__name__.removesuffix("Backward0")
    if getattr(node, "_saved_reduction", None) == _SUM:
        return ConfigError(
            f"task.loss returned a sum over its samples ({name} with reduction=sum), and a step "
            "weighs the mean of each micro-batch, so the gradient would change with the number of "
            "micro-batches and processes",
            fix="return the mean (reduction='mean'), and multiply optimizer.lr by the batch size",
        )
    if not name.startswith("NllLoss") or task.sample_weight is None:
        return None
    total = node._saved_total_weight  # type: ignore[union-attr]
    if isinstance(total, FakeTensor):  # has no values
        return None
    counted = float(total)
    targets = node._saved_target.numel()  # type: ignore[union-attr]
    if counted == targets:
        return None
    return ConfigError(
        f"task.loss is a mean over {counted:g} where the micro-batch has {targets} targets (class "
        "weights, or targets that it ignores), and task.sample_weight says that all samples weigh "
        "the same, so the gradient would change with the number of micro-batches and processes",
        fix="set sample_weight = None in the task and define weight(self, batch): the sum of the "
        "class weights of the batch's targets, or how many of them are not ignored",
    )
