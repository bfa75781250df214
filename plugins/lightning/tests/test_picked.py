"""``task.ckpt_path`` and ``task.ckpt_path_after_fit``: the last and the best of a run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import as_alone, as_torchrun, quiet
from torch import nn
from torch.utils.data import DataLoader
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

EPOCHS, BEST = 6, 3


class Passes(L.LightningModule):
    """Its weight goes up by one an epoch, past the best of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return -self.layer(batch).sum(dim=1).mean() / 2

    def _measured(self, name, batch):
        self.log(name, (self.layer(batch).mean() - 2 * BEST).abs(), sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self._measured("distance", batch)

    def test_step(self, batch, batch_idx):
        self._measured("distance", batch)

    def predict_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def train_dataloader(self):
        return DataLoader(
            torch.ones(2, 2), batch_size=1 if torch.distributed.is_initialized() else 2
        )

    def val_dataloader(self):
        return DataLoader(torch.ones(2, 2), batch_size=1)

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0)


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, monitor="distance", save_last=True, save_top_k=-1)


def run(folder: Path, strategy: str, *, callbacks: Any = (), **knobs: Any) -> dict[str, float]:
    """Metrics of a run that trains, and then tests."""
    quiet()
    task = LightningTask(
        Passes,
        callbacks=callbacks,
        ckpt_path=knobs.pop("ckpt_path", None),
        ckpt_path_after_fit=knobs.pop("after", None),
    )
    options = {"resume": "never", "monitor": "distance", **knobs.pop("checkpoint", {})}
    trainer = Trainer(
        task=task,
        strategy=strategy,
        max_epochs=EPOCHS,
        stages=knobs.pop("stages", ("fit", "test", "predict")),
        eval_every_epochs=1,
        run_dir=folder,
        checkpoint=CheckpointOptions(**options),
        **knobs,
    )
    metrics: dict[str, float] = trainer.run().content["metrics"]
    return metrics


def on_rank(
    world: World, port: int, folder: Path, strategy: str, after: str, own: bool
) -> dict[str, float]:
    if strategy == "single":
        as_alone(folder)
        if world.rank:
            return {}
    else:
        as_torchrun(world, port, folder)
    name = f"{after}-{own}"
    callbacks = [] if own else [saving(folder / name / "theirs")]
    try:
        return run(
            folder / name,
            strategy,
            after=after,
            callbacks=callbacks,
            checkpoint={"every_epochs": 1 if own else None, "at_end": own},
        )
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("own", [False, True])
def test_stages_after_training_have_the_weights_that_are_asked_for(
    strategy, own, on_ranks, tmp_path
):
    best, _ = on_ranks(on_rank, tmp_path, strategy, "best", own)
    assert best["test_distance"] == 0.0
    assert best["distance"] > 0
    last, _ = on_ranks(on_rank, tmp_path, strategy, "last", own)
    assert last["test_distance"] == last["distance"] > 0


def test_it_is_what_lightning_tests(tmp_path):
    quiet()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[saving(tmp_path / "theirs")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Passes())
    (expected,) = trainer.test(ckpt_path="best", verbose=False)
    found = run(tmp_path / "run", "single", callbacks=[saving(tmp_path / "ours")], after="best")
    assert found["test_distance"] == expected["distance"] == 0.0


def test_the_last_checkpoint_of_a_callback_goes_on(tmp_path):
    kept = tmp_path / "kept"
    fit = {"stages": ("fit",), "checkpoint": {"at_end": False}, "ckpt_path": "last"}
    run(tmp_path / "a", "single", callbacks=[saving(kept)], **fit)
    (file,) = kept.glob("last.ckpt")
    assert torch.load(file, weights_only=True)["epoch"] == EPOCHS - 1
    before = file.stat().st_mtime_ns
    run(tmp_path / "b", "single", callbacks=[saving(kept)], **fit)
    assert file.stat().st_mtime_ns == before, "nothing was left to train"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"ckpt_path": "best"}, "before training nothing is the best"),
        ({"after": "newest"}, "ckpt_path_after_fit=newest is unknown"),
        ({"after": "best", "stages": ("test",)}, "trainer.stages has no fit"),
        ({"after": "best", "checkpoint": {"at_end": False}}, "this run saves nothing"),
        ({"after": "best", "checkpoint": {"monitor": "other"}}, "has the metric other"),
    ],
)
def test_what_cannot_be_found_is_refused(knobs, words, tmp_path):
    with pytest.raises(ConfigError, match=words) as refused:
        run(tmp_path, "single", **knobs)
    assert refused.value.fix


def test_a_callback_saves_beside_the_runs_own_checkpoints(tmp_path):
    """As the Hydra template names the folder; no warning of a folder that is not empty."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(tmp_path, "single", callbacks=[saving(tmp_path / "checkpoints")], after="best")
    assert not [one for one in told if "is not empty" in str(one.message)]
    assert (tmp_path / "lightning" / "checkpoints" / "last.ckpt").exists()
    assert not list((tmp_path / "checkpoints").glob("*.ckpt"))
    assert torch.load(tmp_path / "predictions.pt").tolist() == [2.0 * BEST] * 2
