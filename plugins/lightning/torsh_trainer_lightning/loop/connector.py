"""What a module logs: Lightning's own collection, with a short way for what was logged before."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection,
    _ResultMetric,
)
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor


class Connector(_LoggerConnector):
    """Lightning's, but that metrics of a batch are gathered when somebody looks at them."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._stale = False

    def batch_is_over(self, results: _ResultCollection) -> None:
        """``on_batch_end``, put off until somebody looks."""
        self._stale = True
        results.batch = None
        results.batch_size = None

    def settle(self) -> None:
        """Gathers what the batches since the last look have logged, before that is gone."""
        if self._stale:
            self._stale = False
            metrics = self.metrics
            self._progress_bar_metrics.update(metrics["pbar"])
            self._callback_metrics.update(metrics["callback"])
            self._logged_metrics.update(metrics["log"])

    def epoch_end_reached(self) -> None:
        self.settle()
        super().epoch_end_reached()

    def reset_results(self) -> None:
        self._stale = False
        super().reset_results()


class QuickLog:
    """``self.log`` within ``training_step``: what was logged before in the same way, at once.

    It stands in the module's own dictionary while a step runs and is not there otherwise. The first
    batch of an epoch, other kinds of values and other flags go through ``LightningModule.log``,
    which checks them and makes the entry that later batches go to.
    """

    def __init__(
        self, module: LightningModule, connector: Connector, results: _ResultCollection
    ) -> None:
        self._module = module
        self._results = results
        self._log = type(module).log
        self._connector = connector
        self._entries: dict[Any, tuple[_ResultMetric, int | None]] = {}
        self.usable = type(module).log is LightningModule.log and "log" not in vars(module)

    def __call__(self, name: str, value: Any, *args: Any, **flags: Any) -> None:
        if type(value) is Tensor and not args and self._connector._first_loop_iter is False:
            try:
                entry = self._entries.get((name, *flags.items()))
            except TypeError:  # a flag that cannot be a key, such as a group
                entry = None
            if entry is not None and value.dtype is torch.float32 and not value.dim():
                _add(entry[0], value.detach().clone(), entry[1], self._results)
                self._connector._current_fx = "training_step"
                return
        self._slowly(name, value, *args, **flags)

    def _slowly(self, name: str, value: Any, *args: Any, **flags: Any) -> None:
        self._log(self._module, name, value, *args, **flags)
        fx = self._module._current_fx_name
        metric = self._results.get(f"{fx}.{name}")
        if fx != "training_step" or args or metric is None or not _is_quick(metric):
            return
        key = (name, *flags.items())
        with contextlib.suppress(TypeError):
            self._entries[key] = (metric, flags.get("batch_size"))


def _is_quick(metric: _ResultMetric) -> bool:
    meta = metric.meta
    return metric.is_tensor and not meta.enable_graph


def _add(
    metric: _ResultMetric, value: Tensor, batch_size: int | None, results: _ResultCollection
) -> None:
    """``_ResultMetric.update`` for a detached 0-dim float tensor of its own."""
    meta, fields = metric.meta, metric.__dict__
    fields["_computed"] = None
    fields["_update_count"] += 1
    fields["has_reset"] = False
    if meta.on_step:
        kept = value.clone() if meta.on_epoch else value
        fields["_forward_cache"] = kept = meta.sync(kept)
        if not meta.on_epoch:
            metric.value = kept
            return
    if meta.is_mean_reduction:
        if batch_size is None:
            batch_size = results.batch_size
        if batch_size is None:
            batch_size = results.batch_size = _batch_size(results.batch)
        metric.value = metric.value + value * batch_size
        metric.cumulated_batch_size = metric.cumulated_batch_size + batch_size
    elif meta.is_sum_reduction:
        metric.value = metric.value + value
    else:
        metric.value = meta.reduce_fx(metric.value, value)


def _batch_size(batch: Any) -> int:
    """Lightning's answer; a batch of tensors of one length needs no search."""
    if batch is None:
        return 1
    parts = batch if type(batch) in (list, tuple) else (batch,)
    sizes = {part.shape[0] if part.dim() else 1 for part in parts if type(part) is Tensor}
    if len(sizes) == 1 and all(type(part) is Tensor for part in parts):
        return sizes.pop()
    size: int = extract_batch_size(batch)
    return size
