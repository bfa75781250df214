"""A module, a data module or a callback that cannot be trained: one sentence each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch import nn
from torsh_trainer_lightning.checks import check
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import Trainer
from torsh_trainer.errors import ConfigError, Unsupported


class NoStep(L.LightningModule):
    def configure_optimizers(self) -> None: ...


class NoOptimizers(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class NoLoader(BoringModel):
    train_dataloader = L.LightningModule.train_dataloader


class NoTrainData(L.LightningDataModule):
    def val_dataloader(self) -> list[Any]:
        return []


class ShortHook(BoringModel):
    def on_train_batch_start(self, batch: Any) -> None: ...


class OddSetup(BoringDataModule):
    def setup(self) -> None: ...  # type: ignore[override]


class OddCallback(L.Callback):
    def on_train_epoch_end(self, trainer: Any) -> None: ...  # type: ignore[override]


class Clips(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(BoringModel):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters())]


BAD = {
    "no training_step": (LightningTask(NoStep), "NoStep has no training_step"),
    "no configure_optimizers": (LightningTask(NoOptimizers), "has no configure_optimizers"),
    "no loader": (LightningTask(NoLoader), "NoLoader has no train_dataloader"),
    "no loader in the data": (LightningTask(NoLoader, NoTrainData), "NoTrainData, like NoLoader,"),
    "not a module": (LightningTask(lambda: nn.Linear(1, 1)), "Linear, which is no LightningModule"),
    "not data": (LightningTask(BoringModel, lambda: [1]), "list, which is no LightningDataModule"),
    "not a callback": (LightningTask(BoringModel, callbacks=[3]), "int, which is no Callback"),
    "not a logger": (LightningTask(BoringModel, loggers={"a": 3}), "int, which is no Logger"),
    "a short hook": (LightningTask(ShortHook), "ShortHook.on_train_batch_start(batch"),
    "an odd setup": (LightningTask(BoringModel, OddSetup), "OddSetup.setup()"),
    "an odd callback": (LightningTask(BoringModel, callbacks=[OddCallback()]), "OddCallback."),
    "clipping by hand": (LightningTask(Clips), "gradient clipping is not supported for manual"),
    "two optimizers": (
        LightningTask(TwoOptimizers),
        "multiple optimizers is only supported with manual",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_before_the_first_step_in_one_sentence_with_a_way_on(name, tmp_path):
    task, words = BAD[name]
    trainer = Trainer(
        task=task, strategy="single", max_epochs=1, max_grad_norm=1.0, run_dir=tmp_path
    )
    with pytest.raises(ConfigError) as refused:
        trainer.fit()
    assert words in str(refused.value)
    assert refused.value.fix
    assert "\n" not in str(refused.value)


def test_a_module_that_is_all_right_is_not(tmp_path):
    task = LightningTask(BoringModel, BoringDataModule, limit_train_batches=1)
    trainer = Trainer(task=task, strategy="single", max_epochs=1, run_dir=tmp_path)
    assert trainer.fit().content["steps"] == 1


@pytest.mark.parametrize("word", ["optimizer=adamw", "data.num_workers=0", "data@data=none"])
def test_a_group_that_the_module_decides_is_refused_though_it_says_what_is_usual(word: str) -> None:
    trainer = Trainer(
        task=LightningTask(BoringModel),
        command=("python", "-m", "torsh_trainer", "task=lightning", word),
        max_epochs=1,
    )
    with pytest.raises(Unsupported, match=f"cannot honour the group {word[:4]}"):
        trainer.fit()


def test_a_script_may_have_words_of_its_own(tmp_path: Path) -> None:
    command = ("python", "train.py", "optimizer=adamw", "data=mine")
    task = LightningTask(BoringModel, limit_train_batches=1, limit_val_batches=0)
    Trainer(task=task, command=command, max_epochs=1, run_dir=tmp_path / "run").fit()


class OldHooks(BoringModel):
    def on_epoch_end(self) -> None: ...

    def on_my_own_terms(self) -> None: ...


class OldCallback(L.Callback):
    def on_batch_end(self, trainer: Any, module: Any) -> None: ...


def test_a_hook_that_lightning_calls_no_more_is_named(caplog: pytest.LogCaptureFixture) -> None:
    check(OldHooks(), BoringDataModule(), [OldCallback()], [], ["fit"])
    told = [record.message for record in caplog.records]
    said = "Lightning calls no hook of that name; did you mean"
    assert told == [
        f"OldHooks.on_epoch_end: {said} on_test_epoch_end or on_train_epoch_end?",
        f"OldCallback.on_batch_end: {said} on_test_batch_end or on_train_batch_end?",
    ]


def test_hooks_that_lightning_calls_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    check(BoringModel(), BoringDataModule(), [EarlyStopping("loss")], [], ["fit"])
    assert not caplog.records
