"""What a run of ours is around a LightningModule: reports, saves, signals, exact resume."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.callbacks.base import Callback, StepReport
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.errors import Interrupted, TrainingError, Unsupported
from torsh_trainer.schedule.shapes import Cosine


class Draws(L.LightningModule):
    """Dropout, a shuffled loader, Adam with a schedule, means over an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.seen: list[float] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RandomDataset(8, 12), batch_size=2, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RandomDataset(8, 4), batch_size=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.dropout(self.layer(batch)).square().mean()
        self.log("noise", loss + torch.rand(()), on_step=True, on_epoch=True)
        self.seen.append(float(loss))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def run(folder: Path, task: LightningTask, **knobs: Any) -> Any:
    given = {"strategy": "single", "log_every": 1, "seed": 5, "max_epochs": 2, **knobs}
    return Trainer(task=task, run_dir=folder, **given).fit()


def rows(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]


class Stops(Callback):
    """Does something at a step: returns what it gives."""

    def __init__(self, at: int, what: Any) -> None:
        self.at, self.what = at, what

    def on_step(self, report: StepReport) -> bool | None:
        return self.what() if report.step == self.at else None


def test_a_run_reports_what_the_module_logs_beside_loss_and_rate(tmp_path):
    modules = []

    def module() -> Draws:
        modules.append(Draws())
        return modules[-1]

    result = run(tmp_path, LightningTask(module), callbacks=[Jsonl()])
    train = rows(tmp_path)
    assert [row["step"] for row in train] == list(range(1, 13))
    assert [row["loss"] for row in train] == pytest.approx(modules[0].seen)
    assert all("noise_step" in row for row in train)
    assert train[5]["lr"] < train[0]["lr"]
    assert [row["step"] for row in rows(tmp_path, "eval")] == [6, 12]
    assert result.content["steps"] == 12
    assert result.content["epochs"] == 2
    assert result.content["samples"] == 24
    assert result.metrics["val"] == rows(tmp_path, "eval")[-1]["val"]


@pytest.mark.parametrize(("step", "log_every"), [(3, 1), (6, 1), (8, 5)])
def test_a_run_that_goes_on_is_the_undisturbed_run_to_the_last_bit(step, log_every, tmp_path):
    whole = run(
        tmp_path / "whole",
        LightningTask(Draws),
        callbacks=[Jsonl()],
        log_every=log_every,
        checkpoint=CheckpointOptions(every_steps=step, at_end=False),
    )
    saved = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
    resumed = run(
        tmp_path / "resumed",
        LightningTask(Draws),
        callbacks=[Jsonl()],
        log_every=log_every,
        checkpoint=CheckpointOptions(resume=str(saved), at_end=False),
    )
    ours, theirs = (dict(one.model.state_dict()) for one in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    timed = {"elapsed_s", "samples_per_s", "step_s", "data_wait_s", "wall_s"}
    told, expected = (
        [{k: v for k, v in row.items() if k not in timed} for row in found if row["step"] > step]
        for found in (rows(tmp_path / "resumed"), rows(tmp_path / "whole"))
    )
    assert told == expected


def test_a_run_with_more_epochs_goes_on_from_the_end_of_one(tmp_path):
    whole = run(tmp_path / "whole", LightningTask(Draws), max_epochs=3)
    run(tmp_path / "part", LightningTask(Draws), max_epochs=1)
    resumed = run(tmp_path / "part", LightningTask(Draws), max_epochs=3)
    assert resumed.content["epochs"] == 3
    ours, theirs = (dict(one.model.state_dict()) for one in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_callback_of_ours_ends_training(tmp_path):
    result = run(tmp_path, LightningTask(Draws), callbacks=[Stops(4, lambda: True)])
    assert result.content["steps"] == 4


def test_a_signal_saves_and_ends_the_run_which_then_goes_on(tmp_path):
    whole = run(tmp_path / "whole", LightningTask(Draws))
    stops = Stops(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="after step 4"):
        run(tmp_path / "part", LightningTask(Draws), callbacks=[stops])
    resumed = run(tmp_path / "part", LightningTask(Draws))
    ours, theirs = (dict(one.model.state_dict()) for one in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_loss_that_is_not_finite_ends_the_run_unless_it_may_go_on(tmp_path):
    class Breaks(BoringModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.step(batch) * (float("nan") if batch_idx == 2 else 1.0)

    with pytest.raises(TrainingError, match="not finite"):
        run(tmp_path / "stop", LightningTask(Breaks(), limit_train_batches=5))
    task = LightningTask(Breaks(), limit_train_batches=5)
    assert run(tmp_path / "on", task, on_nonfinite="continue").content["steps"] == 10


def test_an_instance_is_trained_where_it_stands(tmp_path):
    module = Draws()
    before = module.layer.weight.clone()
    result = run(tmp_path, LightningTask(module))
    assert result.model is module
    assert not torch.equal(before, module.layer.weight)
    assert "log" not in vars(module)


REFUSED = {
    "schedule": ({"schedule": Cosine()}, "configure_optimizers"),
    "ema_decay": ({"ema_decay": 0.9}, "EMAWeightAveraging"),
    "compile": ({"compile": True}, "configure_model"),
    "eval_every": ({"eval_every": 5}, "task.val_check_interval"),
    "max_grad_value": ({"max_grad_norm": 1.0, "max_grad_value": 1.0}, "give one"),
}


@pytest.mark.parametrize("knob", REFUSED)
def test_a_knob_that_means_nothing_to_a_module_is_refused_by_name(knob, tmp_path):
    knobs, fix = REFUSED[knob]
    with pytest.raises(Unsupported, match=knob) as refused:
        run(tmp_path, LightningTask(Draws), **knobs)
    assert fix in refused.value.fix
