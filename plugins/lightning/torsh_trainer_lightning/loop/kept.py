"""What a module has logged so far in an epoch, as data that a checkpoint holds."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

_PLAIN = tuple(
    field.name for field in fields(_Metadata) if field.name not in ("reduce_fx", "_sync")
)
_TENSORS = ("value", "cumulated_batch_size", "_forward_cache")


def kept(results: _ResultCollection) -> list[dict[str, Any]]:
    """The entries of ``results``, with how they were logged; data alone."""
    return [_kept_entry(key, entry) for key, entry in results.items()]


def _kept_entry(key: str, entry: _ResultMetric) -> dict[str, Any]:
    meta = entry.meta
    told = {
        "key": key,
        "meta": {name: getattr(meta, name) for name in _PLAIN},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "has_reset": entry.has_reset,
        "updates": entry._update_count,
        "is_tensor": entry.is_tensor,
    }
    if entry.is_tensor:
        held = {name: getattr(entry, name, None) for name in _TENSORS}
        return {**told, "tensors": {k: v for k, v in held.items() if v is not None}}
    metric: Any = entry.value
    return {
        **told,
        "tensors": {name: getattr(metric, name) for name in metric._defaults},
        "metric_updates": metric._update_count,
    }


def restored(
    results: _ResultCollection, entries: list[dict[str, Any]], module: LightningModule, reduce: Any
) -> None:
    """Fills ``results`` with what ``kept`` gave; metrics of the module take back their states."""
    for told in entries:
        should, rank_zero_only = told["sync"]
        meta = _Metadata(**told["meta"], reduce_fx=getattr(torch, told["reduce_fx"]))
        meta.sync = _Sync(fn=reduce, _should=should, rank_zero_only=rank_zero_only)
        entry = _ResultMetric(meta, told["is_tensor"])
        device = module.device
        if told["is_tensor"]:
            for name, value in told["tensors"].items():
                setattr(entry, name, value.to(device))
        else:
            entry.value = _refilled(module.get_submodule(meta.metric_attribute or ""), told)
        entry.has_reset = told["has_reset"]
        entry._update_count = told["updates"]
        results[told["key"]] = entry


def _refilled(metric: Any, told: dict[str, Any]) -> Metric:
    assert isinstance(metric, Metric)
    for name, value in told["tensors"].items():
        setattr(metric, name, _on(value, metric.device))
    metric._update_count = told["metric_updates"]
    metric._computed = None
    return metric


def _on(value: Any, device: torch.device) -> Any:
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)
