"""Forwards without gradients, for metrics and predictions: a part of a native engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from torsh_trainer.optim.ema import Ema
from torsh_trainer.strategies.buffers import Buffers
from torsh_trainer.strategies.writes import Writes
from torsh_trainer.tasks.base import Mean, Task, metrics_of, sum_of

Around = Callable[[bool], contextlib.AbstractContextManager[None]]
"""What an engine does around an evaluation, which is of the moving average or not."""


class Evaluation:
    """Runs ``module``, the wrapper around ``model``, in evaluation mode.

    ``autocast`` is the dtype that autocast computes in, None for none. ``ema`` is the moving
    average, if there is one. ``around`` is entered first and left last. ``writes`` looks for
    parameters that a forward writes to.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        device: torch.device,
        *,
        buffers: Buffers,
        autocast: torch.dtype | None,
        ema: Ema | None,
        around: Around,
        writes: Writes,
    ) -> None:
        self._model = model
        self._module = module
        self._device = device
        self._buffers = buffers
        self._autocast = autocast
        self._ema = ema
        self._around = around
        self._writes = writes

    def evaluate(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool
    ) -> dict[str, Mean]:
        """See ``Engine.evaluate``."""
        parts: dict[str, list[Mean]] = {}
        with self.running(averaged=averaged):
            for batch, counts in batches:
                with self._writes.watch_evaluation():
                    metrics = metrics_of(task.evaluate(self._module, batch))
                if counts:
                    for name, mean in metrics.items():
                        parts.setdefault(name, []).append(mean)
        return {name: sum_of(name, means) for name, means in parts.items()}

    def predict(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool
    ) -> Iterator[Any]:
        """See ``Engine.predict``."""
        with self.running(averaged=averaged):
            for batch, counts in batches:
                with self._writes.watch_evaluation():
                    outputs = task.predict(self._module, batch)
                if counts:
                    yield outputs

    @contextlib.contextmanager
    def running(self, *, averaged: bool) -> Iterator[None]:
        """Around such forwards: the mode, the numbers, and no gradients."""
        with self._around(averaged):
            self._buffers.gather()
            training = self._model.training
            swapped = self._ema.swap_in() if averaged and self._ema else contextlib.nullcontext()
            precision = (
                contextlib.nullcontext()
                if self._autocast is None
                else torch.autocast(self._device.type, dtype=self._autocast)
            )
            self._module.eval()
            try:
                with torch.no_grad(), swapped, precision:
                    yield
            finally:
                self._module.train(training)


def nothing_around(averaged: bool) -> contextlib.AbstractContextManager[None]:
    """The null ``Around``."""
    return contextlib.nullcontext()
