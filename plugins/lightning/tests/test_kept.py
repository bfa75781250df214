"""What was logged so far in an epoch, put together on other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from torchmetrics import CatMetric, MeanSquaredError, MinMetric, PearsonCorrCoef
from torsh_trainer_lightning.loop.kept import (
    check_merging,
    entries_of,
    merge_entries,
    pack_results,
    restore_results,
)

from torsh_trainer.errors import ConfigError


class Gathers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict(
            {"error": MeanSquaredError(), "all": CatMetric(), "least": MinMetric()}
        )


def logged(module: Gathers, values: Sequence[float]) -> _ResultCollection:
    """What a rank has that was given these values."""
    results = _ResultCollection(training=True)
    for value in map(torch.tensor, values):
        for how in ("mean", "max", "min", "sum"):
            results.log("training_step", how, value, reduce_fx=how, batch_size=int(value))
        for name, metric in module.metrics.items():
            metric.update(*([value, torch.zeros(())] if name == "error" else [value]))
            results.log("training_step", name, metric, metric_attribute=f"metrics.{name}")
    return results


def means(results: _ResultCollection) -> dict[str, Any]:
    found = {key: entry.compute() for key, entry in results.items()}
    return {key: value.tolist() for key, value in found.items()}


def test_what_several_processes_have_gathered_goes_together():
    """On fewer of them; one that is new has everything, and nothing in it."""
    check_merging(entries_of(pack_results(logged(Gathers(), [1.0]))), Gathers())
    parts = [
        entries_of(pack_results(logged(Gathers(), values))) for values in ([2.0, 5.0], [9.0], [1.0])
    ]
    expected = means(logged(Gathers(), [2.0, 5.0, 9.0, 1.0]))
    module, results = Gathers(), _ResultCollection(training=True)
    restore_results(results, merge_entries(parts, parts[0], module), module, None)
    assert means(results) == expected
    module, fresh = Gathers(), _ResultCollection(training=True)
    restore_results(fresh, merge_entries([], parts[0], module), module, None)
    assert fresh.keys() == results.keys()
    alone = [entries_of(pack_results(fresh)), parts[1]]
    module, results = Gathers(), _ResultCollection(training=True)
    restore_results(results, merge_entries(alone, parts[0], module), module, None)
    assert means(results) == means(logged(Gathers(), [9.0]))


def test_a_metric_that_does_not_say_how_its_states_go_together_is_refused():
    class Correlates(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.metric = PearsonCorrCoef()

    module, results = Correlates(), _ResultCollection(training=True)
    module.metric.update(torch.arange(3.0), torch.arange(3.0))
    results.log("training_step", "r", module.metric, metric_attribute="metric")
    part = entries_of(pack_results(results))
    with pytest.raises(ConfigError, match="the metric r has gathered"):
        check_merging(part, module)
