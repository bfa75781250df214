"""What a module has logged so far in an epoch, as data that a checkpoint holds."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
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
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from torsh_trainer.errors import ConfigError

_PLAIN = tuple(
    field.name for field in fields(_Metadata) if field.name not in ("reduce_fx", "_sync")
)
_SUMS = ("value", "cumulated_batch_size")
_TENSORS = (*_SUMS, "_forward_cache")


Entries = list[dict[str, Any]]
"""What was logged, as plain values and tensors."""


def pack_results(results: _ResultCollection) -> bytes:
    """The entries of ``results``, with how they were logged; data alone."""
    buffer = io.BytesIO()
    torch.save([_pack_entry(key, entry) for key, entry in results.items()], buffer)
    return buffer.getvalue()


def entries_of(data: bytes) -> Entries:
    """What ``pack_results`` gave, read as data."""
    found: Entries = torch.load(io.BytesIO(data), weights_only=True)
    return found


def _pack_entry(key: str, entry: _ResultMetric) -> dict[str, Any]:
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


def restore_results(
    results: _ResultCollection, entries: Entries, module: LightningModule, reduce: Any
) -> None:
    """Fills ``results`` with what was kept; metrics of the module take back their states."""
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
            entry.value = _refill_metric(module.get_submodule(meta.metric_attribute or ""), told)
        entry.has_reset = told["has_reset"]
        entry._update_count = told["updates"]
        results[told["key"]] = entry


def _refill_metric(metric: Any, told: dict[str, Any]) -> Metric:
    assert isinstance(metric, Metric)
    for name, value in told["tensors"].items():
        setattr(metric, name, _on(value, metric.device))
    metric._update_count = told["metric_updates"]
    metric._computed = None
    return metric


def _on(value: Any, device: torch.device) -> Any:
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)


# -- on other processes than before ---------------------------------------------------------------


def check_merging(entries: Entries, module: LightningModule) -> None:
    """Looks whether what several ranks have gathered can be put together.

    Raises:
        ConfigError: a metric of the module does not say how its states go together.
    """
    for told in entries:
        reductions = {} if told["is_tensor"] else _metric_of(told, module)._reductions
        if any(how is not dim_zero_cat and how not in _TOGETHER for how in reductions.values()):
            raise ConfigError(
                "the checkpoint lies in the middle of an epoch, and what the metric "
                f"{told['meta']['name']} has gathered there on several processes cannot be put "
                "together",
                fix="go on with as many processes, or from the end of an epoch",
            )


_TOGETHER: dict[Any, Any] = {
    dim_zero_sum: torch.add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
}


def merge_entries(parts: Sequence[Entries], first: Entries, module: LightningModule) -> Entries:
    """One rank's entries from those that it takes over, which ``check_merging`` has let pass.

    With none of them it has those of the ``first`` rank, and nothing gathered in them yet: where
    ranks meet over what was logged, each has to have it.
    """
    if not parts:
        return [_empty_entry(told, module) for told in first]
    by_key = {told["key"]: told for told in parts[0]}
    for part in parts[1:]:
        for told in part:
            held = by_key.get(told["key"])
            by_key[told["key"]] = told if held is None else _join_entries(held, told, module)
    return list(by_key.values())


def _empty_entry(told: dict[str, Any], module: LightningModule) -> dict[str, Any]:
    tensors = told["tensors"]
    if told["is_tensor"]:
        empty = {"max": -torch.inf, "min": torch.inf}.get(told["reduce_fx"], 0.0)
        fresh = {"value": torch.full_like(tensors["value"], empty)}
        if "cumulated_batch_size" in tensors:
            fresh["cumulated_batch_size"] = torch.zeros_like(tensors["cumulated_batch_size"])
    else:
        fresh = _metric_of(told, module)._defaults
    return {**told, "tensors": {**tensors, **fresh}}


def _join_entries(
    held: dict[str, Any], more: dict[str, Any], module: LightningModule
) -> dict[str, Any]:
    ours, theirs = held["tensors"], more["tensors"]
    if held["is_tensor"]:
        how = {"max": torch.maximum, "min": torch.minimum}.get(held["reduce_fx"], torch.add)
        sums = {name: how(ours[name], theirs[name]) for name in _SUMS if name in ours}
    else:
        reductions = _metric_of(held, module)._reductions
        sums = {name: _together(how, ours[name], theirs[name]) for name, how in reductions.items()}
    return {**held, "tensors": {**ours, **sums}}


def _together(how: Any, ours: Any, theirs: Any) -> Any:
    if how is dim_zero_cat:
        return [*ours, *theirs] if isinstance(ours, list) else torch.cat([ours, theirs])
    return _TOGETHER[how](ours, theirs)


def _metric_of(told: dict[str, Any], module: LightningModule) -> Any:
    return module.get_submodule(told["meta"]["metric_attribute"] or "")


# -- a batch that does not count ------------------------------------------------------------------


def count_batch(
    trainer: Any, results: _ResultCollection, counts: bool
) -> contextlib.AbstractContextManager[None]:
    """Around a batch: unless it ``counts``, what it logs and measures is gathered nowhere."""
    return _AS_IT_IS if counts else _forget_logged(trainer.lightning_module, results)


_AS_IT_IS = contextlib.nullcontext()


@contextlib.contextmanager
def _forget_logged(module: LightningModule, results: _ResultCollection) -> Iterator[None]:
    gathering = [entry for entry in results.values() if entry.is_tensor]
    gathering += [each for each in module.modules() if isinstance(each, Metric)]
    held = [
        (each, {name: _copy(getattr(each, name)) for name in each._defaults}) for each in gathering
    ]
    known = {id(each) for each in gathering}
    try:
        yield
    finally:
        now = [entry for entry in results.values() if entry.is_tensor and id(entry) not in known]
        # What was logged for the first time has gathered nothing.
        for each, before in (*held, *((entry, entry._defaults) for entry in now)):
            for name, value in before.items():
                setattr(each, name, _copy(value))
            each._computed = None


def _copy(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()
