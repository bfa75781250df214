"""A number that a task changes while it trains and that no checkpoint has is named once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import CheckpointOptions, DataSource, Loading, OptimizerSpec, Task, Trainer

X = torch.arange(32.0).view(16, 2) / 32


class Source(DataSource):
    train = TensorDataset(X, X.sum(1, keepdim=True))


class Warms(Task):
    """The loss grows in weight with the micro-batches that it has seen."""

    data = Source()
    optimizer = OptimizerSpec("SGD", lr=0.1)

    def __init__(self) -> None:
        self.seen = 0
        self.factor = 2.0
        self.is_ready = False

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.seen += 1
        self.is_ready = True
        return F.mse_loss(outputs, batch[1]) * min(1.0, self.seen / 4)


class Saves(Warms):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


class Still(Warms):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


def fit(task: Task, folder: Path, steps: int, resume: str = "never") -> dict[str, Tensor]:
    saving = CheckpointOptions(every_steps=2, resume=resume)
    loading = Loading(batch_size=4, shuffle=False)
    result = Trainer(
        task=task, loading=loading, max_steps=steps, checkpoint=saving, run_dir=folder, callbacks=[]
    ).fit()
    assert result.model is not None
    return result.model.state_dict()


def test_it_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(Warms(), tmp_path, 6)
    told = [r.getMessage() for r in caplog.records if "in no checkpoint" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Warms.seen has changed while it trains")


@pytest.mark.parametrize("task", [Saves(), Still()])
def test_what_is_saved_or_stays_is_not(
    task: Task, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(task, tmp_path, 6)
    assert "in no checkpoint" not in caplog.text


def test_a_run_that_saves_it_goes_on_as_if_undisturbed_and_one_that_does_not_trains_otherwise(
    tmp_path: Path,
) -> None:
    """The control: what the log warns of does happen."""
    whole = fit(Saves(), tmp_path / "whole", 4)
    for kind in (Saves, Warms):
        folder = tmp_path / kind.__name__
        fit(kind(), folder, 2)
        again = fit(kind(), folder, 4, resume="auto")
        assert all(torch.equal(again[name], whole[name]) for name in whole) is (kind is Saves)
