"""Errors are in the words of who reads them: of our configuration, or of Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from loops import as_torchrun, quiet
from test_loop_ranks import Net, Rows
from torch import nn
from torsh_trainer_lightning import TorshStrategy
from torsh_trainer_lightning.task import LightningTask
from torsh_trainer_lightning.words import reword_text

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.environments.world import World


class Spares(Net):
    """A part of it is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Detached(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


def told(world: World, port: int, folder: Path, kind: type[Net], strategy: str, loop: str) -> str:
    """What a rank is told."""
    as_torchrun(world, port, folder)
    quiet()
    try:
        if loop == "ours":
            Trainer(
                task=LightningTask(kind, Rows),
                strategy=strategy,
                max_epochs=1,
                run_dir=folder / "run",
                checkpoint=CheckpointOptions(resume="never", at_end=False),
            ).fit()
        else:
            L.Trainer(
                accelerator="cpu",
                devices=world.size,
                strategy=TorshStrategy(strategy),
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(kind(), Rows())
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return str(error)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return ""


@pytest.mark.parametrize(
    ("kind", "strategy", "ours", "theirs"),
    [
        (
            Spares,
            "ddp",
            "strategy.find_unused_parameters=true",
            'TorshStrategy("ddp", find_unused_parameters=True)',
        ),
        (Detached, "ddp", "training_step returned a value without a gradient", ""),
    ],
)
def test_each_reader_has_words_of_his_own(kind, strategy, ours, theirs, on_ranks, tmp_path):
    said = on_ranks(told, tmp_path, kind, strategy, "ours")[0]
    assert ours in said
    assert "TorshStrategy" not in said
    if theirs:
        said = on_ranks(told, tmp_path, kind, strategy, "theirs")[0]
        assert theirs in said
        assert "strategy." not in said


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("task.loss returned a value", "training_step returned a value"),
        ("task.evaluate is", "validation_step is"),
        ("my.task.loss and task.losses", "my.task.loss and task.losses"),
        ("set strategy=ddp or trainer.accumulate=2", "set strategy=ddp or trainer.accumulate=2"),
    ],
)
def test_in_our_loop_a_module_has_its_own_methods_and_our_settings(said, words):
    assert reword_text(said) == words
