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
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.callbacks.base import Callback, StepReport
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.environments.world import World
from torsh_trainer.errors import Interrupted, TrainingError, Unsupported
from torsh_trainer.optim.schedule.shapes import Cosine
from torsh_trainer.strategies.clipping import HeldGradients
from torsh_trainer.tasks.base import DataSource
from torsh_trainer.training.preview import preview


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
    return Trainer(task=task, run_dir=folder, **given).fit(*given.get("stages", ("fit",)))


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


class Net(L.LightningModule):
    """No random numbers; ``hooked`` sends it Lightning's way around a step."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.lr = 0.1
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 2)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
        return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.second(self.first(batch)).square().mean()
        if self.automatic_optimization:
            return loss
        self.zero_grad()
        self.manual_backward(loss)
        self.measure()
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        return None

    def measure(self) -> None:
        """Before clipping, and before any step."""

    def configure_optimizers(self) -> Any:
        parts = [self] if self.automatic_optimization else [self.first, self.second]
        made = [torch.optim.SGD(part.parameters(), lr=self.lr) for part in parts]
        return made[0] if len(made) == 1 else made


class Measured(Net):
    """Notes the norm of its gradients by Lightning's own function, before they are clipped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            self.measure()

    def measure(self) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))


@pytest.mark.parametrize(
    ("kind", "manual", "knobs"),
    [
        (Net, False, {}),
        (Net, False, {"max_grad_norm": 0.01}),
        (Net, False, {"max_grad_value": 0.01, "accumulate": 3}),
        (Measured, False, {"max_grad_norm": 0.01}),
        (Measured, False, {"max_grad_value": 0.01}),
        (Net, True, {}),
    ],
    ids=["plain", "norm", "value", "hooked", "hooked-value", "manual"],
)
def test_the_norm_of_a_steps_gradients_is_that_of_lightning_before_clipping(
    kind, manual, knobs, tmp_path
):
    ours, theirs = in_their_words(knobs)
    L.seed_everything(5, verbose=False)
    expected = Measured(manual=manual)
    lightning_trainer(tmp_path, max_epochs=2, **theirs).fit(expected)
    run(tmp_path, LightningTask(lambda: kind(manual=manual)), callbacks=[Jsonl()], **ours)
    told = [row["grad_norm"] for row in rows(tmp_path)]
    assert told == pytest.approx(expected.norms, rel=1e-6)
    assert len(told) == (6 if "accumulate" in knobs else 16)


def test_norms_are_measured_for_reports_alone(tmp_path, monkeypatch):
    measured: list[Any] = []
    norm = HeldGradients.norm
    monkeypatch.setattr(HeldGradients, "norm", lambda *args: measured.append(1) or norm(*args))
    run(tmp_path, LightningTask(Net), callbacks=[Jsonl()], log_every=5, max_epochs=1)
    assert [row["step"] for row in rows(tmp_path) if "grad_norm" in row] == [1, 5]
    assert len(measured) == 2


def test_a_finder_of_lightnings_leaves_no_trace_of_its_trials(tmp_path):
    def finder() -> LearningRateFinder:
        return LearningRateFinder(max_lr=0.1, num_training_steps=25)

    L.seed_everything(5, verbose=False)
    theirs = Losses()
    expected = Net()
    lightning_trainer(tmp_path, max_epochs=4, callbacks=[finder(), theirs]).fit(expected)
    task = LightningTask(Net, callbacks=[finder()])
    result = run(tmp_path, task, callbacks=[Jsonl()], max_epochs=4)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 33))
    assert [row["loss"] for row in rows(tmp_path)] == theirs.seen
    assert rows(tmp_path)[0]["lr"] == expected.lr != 0.1
    assert result.content["samples"] == 64


class Losses(L.Callback):
    """Notes the loss of each batch, but those of a finder, which puts callbacks aside."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def lightning_trainer(folder: Path, **flags: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        enable_checkpointing=False,
        **{**quiet, **flags},
    )


def in_their_words(knobs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Knobs of a run, and the same as flags of lightning.Trainer."""
    flags: dict[str, Any] = {"accumulate_grad_batches": knobs.get("accumulate", 1)}
    for how in ("norm", "value"):
        if f"max_grad_{how}" in knobs:
            flags |= {
                "gradient_clip_val": knobs[f"max_grad_{how}"],
                "gradient_clip_algorithm": how,
            }
    return knobs, flags


def test_what_a_run_would_take_from_a_checkpoint_is_told_without_running_it(tmp_path):
    def trainer(**knobs: Any) -> Trainer:
        given = {"strategy": "single", "seed": 5, "max_epochs": 2, "run_dir": tmp_path, **knobs}
        return Trainer(task=LightningTask(Draws), **given)

    trainer(checkpoint=CheckpointOptions(every_steps=8)).fit()
    told = preview(trainer(), World(), run_dir=tmp_path)
    assert not told.refused
    assert "epoch 2 begins" in told.text
    assert "StepLR" in told.text
    assert "reached trainer.max_epochs=2" in told.text
    middle = CheckpointOptions(resume=str(tmp_path / "checkpoints" / "step-00000008"))
    told = preview(trainer(checkpoint=middle), World(), run_dir=tmp_path)
    assert "epoch 1 goes on after 2 batches of each process" in told.text
    assert "Nothing is known that would make it differ" in told.text
    two = World(size=2, local_size=2)
    told = preview(trainer(checkpoint=middle, strategy="ddp"), two, run_dir=tmp_path)
    assert told.refused
    assert "middle of an epoch of 1 process, and these are 2" in told.text
    told = preview(trainer(strategy="ddp", max_epochs=3), two, run_dir=tmp_path)
    assert not told.refused
    assert "follow the processes: they were 1 and are 2" in told.text
    own = CheckpointOptions(resume="some.ckpt")
    assert "task's own to read" in preview(trainer(checkpoint=own), World(), run_dir=tmp_path).text


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
    "find_lr": ({"stages": ("find_lr", "fit")}, "callbacks.LearningRateFinder"),
    "find_batch_size": ({"stages": ("find_batch_size",)}, "callbacks.BatchSizeFinder"),
}


@pytest.mark.parametrize("knob", REFUSED)
def test_a_knob_that_means_nothing_to_a_module_is_refused_by_name(knob, tmp_path):
    knobs, fix = REFUSED[knob]
    with pytest.raises(Unsupported, match=knob) as refused:
        run(tmp_path, LightningTask(Draws), **knobs)
    assert fix in refused.value.fix


def test_a_data_group_is_refused(tmp_path):
    class Digits(DataSource):
        """What the group would choose."""

    task = LightningTask(Draws)
    task.data = Digits()  # as the command line gives it
    with pytest.raises(Unsupported, match="the group data"):
        run(tmp_path, task)


class Quasi(Draws):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


def test_lbfgs_is_refused_before_training_where_its_state_would_be_saved(tmp_path):
    with pytest.raises(Unsupported, match="LBFGS keeps lists of earlier steps"):
        run(tmp_path / "saving", LightningTask(Quasi), max_epochs=1)
    assert not list((tmp_path / "saving").rglob("step-*"))
    quiet = CheckpointOptions(at_end=False)
    result = run(tmp_path / "quiet", LightningTask(Quasi), max_epochs=1, checkpoint=quiet)
    assert result.content["steps"] > 0
