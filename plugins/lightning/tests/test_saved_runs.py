"""What our checkpoints hold of a module's run: Lightning goes on from an export of one."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from loops import quiet
from test_strategy import loader
from torch import nn
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.checkpoint.cli.export import Export, export
from torsh_trainer.optim.precision import Precision


class Scheduled(L.LightningModule):
    """A rate that halves its way, and a width that nobody can guess."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def train_dataloader(self):
        return loader()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def lightnings(module: L.LightningModule, folder: Path, epochs: int, **fit: object) -> L.Trainer:
    """A Trainer of Lightning's own that has fitted ``module``."""
    quiet()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, **fit)
    return trainer


def ours(kind: type[Scheduled], folder: Path) -> None:
    """One epoch in our loop, saved at its end."""
    Trainer(
        task=LightningTask(lambda: kind(8)),
        strategy="single",
        seed=7,
        max_epochs=1,
        run_dir=folder,
        checkpoint=CheckpointOptions(resume="never"),
    ).run()


def test_lightning_goes_on_from_an_export_as_from_its_own_checkpoint(tmp_path):
    L.seed_everything(7, verbose=False)
    lightnings(Scheduled(8), tmp_path, 1).save_checkpoint(tmp_path / "theirs.ckpt")
    ours(Scheduled, tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").glob("step*"))
    file = tmp_path / "ours.ckpt"
    export(newest, Export("lightning", file))
    theirs, exported = (
        torch.load(tmp_path / name, weights_only=True) for name in ("theirs.ckpt", "ours.ckpt")
    )
    assert exported["lr_schedulers"] == theirs["lr_schedulers"]
    assert exported["hyper_parameters"] == theirs["hyper_parameters"]
    assert Scheduled.load_from_checkpoint(file).hparams.width == 8
    ends = []
    for path in (tmp_path / "theirs.ckpt", file):
        L.seed_everything(8, verbose=False)
        module = Scheduled(8)
        lightnings(module, tmp_path, 2, ckpt_path=path, weights_only=True)
        ends.append([p.detach() for p in module.parameters()])
    assert all(map(torch.equal, *ends))


class Listening(Scheduled):
    """Keeps in what its last step was computed, and what Lightning calls that."""

    seen: tuple[torch.dtype, str]

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = self.layers(x)
        type(self).seen = outputs.dtype, str(self.trainer.precision)
        return nn.functional.cross_entropy(outputs, y)


def test_a_run_goes_on_in_bf16_where_no_precision_is_named(tmp_path: Path) -> None:
    quiet()
    knobs = {
        "task": LightningTask(lambda: Listening(8)),
        "strategy": "single",
        "run_dir": tmp_path / "run",
        "eval_every_epochs": None,
    }
    Trainer(max_steps=1, precision=Precision(compute="bf16"), **knobs).fit()
    result = Trainer(max_steps=2, **knobs).fit()
    assert result.content["precision"] == "bf16-mixed"
    assert Listening.seen == (torch.bfloat16, "bf16-mixed")
    Trainer(max_steps=3, precision=Precision(), **knobs).fit()
    assert Listening.seen == (torch.float32, "32-true")
