"""A run of a LightningModule reports, saves and stops by what the trainer's own loop does it by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.callbacks.base import Callback
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.errors import ConfigError, ResourceError


class Short(BoringModel):
    """A mean that training brings down."""

    def val_dataloader(self) -> Any:
        return []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(folder: Path, module: type[L.LightningModule] = Short, **knobs: Any) -> Any:
    given = {"max_steps": 3, "strategy": "single", "device": "cpu", "log_every": 2, **knobs}
    return Trainer(task=LightningTask(module), run_dir=folder, **given).fit()


class Answers(Callback):
    def on_step(self, report: Any) -> Any:
        return 0.5


def test_a_callback_that_answers_with_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Answers.on_step returned a float"):
        run(tmp_path, callbacks=[Answers()])


def test_samples_per_second_are_of_this_run_alone(tmp_path: Path) -> None:
    assert run(tmp_path).content["samples_per_s"] > 0
    again = run(tmp_path).content
    assert (again["steps"], again["samples_per_s"]) == (3, None)


class FullOnce(DcpCheckpointer):
    """The disk has refused the first save, as one learns who waits for it."""

    full: bool | None = None

    def save(self, step: int, state: Any, metrics: Any) -> Any:
        path = super().save(step, state, metrics)
        self.full = self.full is None
        return path

    def wait(self) -> None:
        super().wait()
        if self.full:
            self.full = False
            raise ResourceError("the disk is full", fix="make room")


def test_a_last_save_that_the_disk_has_refused_is_made_once_more(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torsh_trainer.checkpoint.dcp.DcpCheckpointer", FullOnce)
    told: list[str] = []

    class Hears(Callback):
        def on_save(self, report: Any) -> None:
            told.append(Path(report.path).name)

    saves = CheckpointOptions(check_loaded=False)
    content = run(tmp_path, callbacks=[Hears()], checkpoint=saves).content
    assert told == ["step-00000003"] * 2
    assert Path(content["checkpoint"]).is_dir()


class Shaped(Short):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss.reshape(1) if batch_idx else loss.sum()


def test_a_loss_of_one_element_is_a_loss_whatever_its_shape(tmp_path: Path) -> None:
    one, other = run(tmp_path / "one").content, run(tmp_path / "other", Shaped).content
    assert one["train_loss"] == other["train_loss"]
