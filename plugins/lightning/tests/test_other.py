"""Modules of ``pytorch_lightning``, which every installation of ``lightning`` brings along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as own
import pytest
import pytorch_lightning as other
import torch
from loops import quiet
from test_loop_ranks import BATCH, SAMPLES
from torch import nn
from torch.utils.data import DataLoader
from torsh_trainer_lightning import TorshStrategy
from torsh_trainer_lightning.names import register
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.errors import ConfigError, Unsupported


def parts(pl: Any) -> tuple[type, type, list[Any]]:
    """A module, its data and callbacks, all of ``pl``; with a class in between, and ``super()``."""

    class Base(pl.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.width = width

        def on_train_start(self) -> None:
            super().on_train_start()
            assert isinstance(self, pl.LightningModule) or pl is other

    class Net(Base):
        def __init__(self, width: int = 8) -> None:
            super().__init__(width)
            self.net = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.2), nn.Linear(width, 2))

        def training_step(self, batch, batch_idx):
            loss = self.net(batch).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch).square().mean())

        def configure_callbacks(self):
            return [pl.callbacks.EarlyStopping("val_loss", patience=9)]

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.05)

    class Rows(pl.LightningDataModule):
        def train_dataloader(self):
            rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
            return DataLoader(rows, batch_size=BATCH, shuffle=True)

        def val_dataloader(self):
            return DataLoader(torch.ones(4, 8), batch_size=BATCH)

    class Counts(pl.Callback):
        batches = 0

        def on_train_batch_end(self, trainer, *args):
            self.batches += 1

    return Net, Rows, [Counts(), pl.callbacks.ModelCheckpoint("kept", save_last=True)]


def trained(pl: Any, folder: Path) -> Any:
    """The module and its counter after a run of ours."""
    quiet()
    kind, data, callbacks = parts(pl)
    made: list[Any] = []

    def module() -> Any:
        made.append(kind())
        return made[0]

    Trainer(
        task=LightningTask(
            module, data, callbacks=callbacks, loggers=[pl.loggers.CSVLogger("logs")]
        ),
        strategy="single",
        seed=3,
        max_epochs=2,
        run_dir=folder,
        checkpoint=CheckpointOptions(resume="never"),
    ).run()
    return made[0], callbacks[0]


def test_a_module_of_the_other_distribution_trains_alike(tmp_path):
    module, counts = trained(other, tmp_path / "other")
    expected, _ = trained(own, tmp_path / "own")
    assert counts.batches == 2 * SAMPLES // BATCH
    for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert isinstance(module, own.LightningModule)
    assert (tmp_path / "kept" / "last.ckpt").exists()


def test_another_version_of_it_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(other, "__version__", "1.9.5")
    with pytest.raises(ConfigError, match=r"pytorch_lightning 1\.9\.5") as refused:
        trained(other, tmp_path)
    assert "import lightning.pytorch" in refused.value.fix


@pytest.mark.parametrize("by_name", [True, False])
def test_its_trainer_is_refused_in_one_sentence(by_name):
    register()
    strategy = "torsh_ddp" if by_name else TorshStrategy("ddp")
    with pytest.raises(Unsupported, match="this one is pytorch_lightning's") as refused:
        other.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)
    assert "import lightning.pytorch as pl" in refused.value.fix
