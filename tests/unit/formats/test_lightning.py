"""Lightning goes on from a checkpoint, and is gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from formats.fitting import (
    ADAMW,
    BATCH,
    HALF,
    WHOLE,
    Net,
    assert_same,
    batches,
    options,
    saved_model,
    train,
)
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, Dataset

from torsh_trainer import CheckpointOptions
from torsh_trainer.checkpoint.cli.export import export
from torsh_trainer.checkpoint.cli.importing import Import, import_file
from torsh_trainer.optim.schedule.shapes import Cosine
from torsh_trainer.optim.schedule.torch_scheduler import TorchSchedule


class Lit(LightningModule):
    """The same training as a LightningModule, its batches in our order."""

    def __init__(self, scheduler: str = "lambda") -> None:
        super().__init__()
        self.model = Net()
        self.scheduler = scheduler
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        trained = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for _, p in trained if p.ndim > 1]},
            {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=ADAMW.lr, weight_decay=0.1)
        if self.scheduler == "lambda":
            schedule: Any = LambdaLR(optimizer, lambda update: Cosine().factor(update, WHOLE))
        else:
            schedule = CosineAnnealingLR(optimizer, T_max=WHOLE)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Ordered(Dataset):
    """Our batches from a step on, each a sample."""

    def __init__(self, first: int) -> None:
        self.batches = batches(first, WHOLE)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> list[Tensor]:
        return self.batches[i]


def lightning(folder: Path, steps: int) -> LightningTrainer:
    return LightningTrainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def loader(first: int) -> DataLoader:
    return DataLoader(Ordered(first), batch_size=None)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("scheduler", ["lambda", "cosine"])
def test_lightning_goes_on_from_an_export(scheduler, whole, half, tmp_path):
    (file,), notes = export(
        half, options(tmp_path / "model.ckpt", format="lightning", prefix="model.")
    )
    assert notes == []
    found = Lit.load_from_checkpoint(file, map_location="cpu")
    assert_same(dict(found.model.state_dict()), saved_model(half))

    module = Lit(scheduler)
    trainer = lightning(tmp_path, WHOLE)
    trainer.fit(module, loader(HALF), ckpt_path=file)
    assert trainer.global_step == WHOLE
    assert module.losses == pytest.approx(whole.losses[HALF:], rel=1e-5)
    torch.testing.assert_close(module.model.state_dict(), whole.model.state_dict())


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_a_run_goes_on_from_what_lightning_saved_with_its_schedule(tmp_path):
    torch.manual_seed(5)
    module = Lit("cosine")
    trainer = lightning(tmp_path, HALF)
    trainer.fit(module, loader(0))
    trainer.save_checkpoint(tmp_path / "lit.ckpt")
    trained = [n for n, p in module.model.named_parameters() if p.requires_grad]
    shapes = dict(module.model.named_parameters())
    names = [n for n in trained if shapes[n].ndim > 1] + [n for n in trained if shapes[n].ndim < 2]
    (tmp_path / "names.txt").write_text("\n".join(names))
    path, _ = import_file(
        Import(
            tmp_path / "lit.ckpt",
            tmp_path / "in",
            strip="model.",
            parameters=tmp_path / "names.txt",
            samples=HALF * BATCH,
        )
    )
    found = train(
        tmp_path / "run",
        WHOLE,
        schedule=TorchSchedule(scheduler="CosineAnnealingLR", options={"T_max": WHOLE}),
        checkpoint=CheckpointOptions(resume=str(path)),
        frozen=("frozen.*",),
    )

    torch.manual_seed(5)
    undisturbed = Lit("cosine")
    lightning(tmp_path, WHOLE).fit(undisturbed, loader(0))
    assert found.losses == pytest.approx(undisturbed.losses[HALF:], rel=1e-5)
    torch.testing.assert_close(found.model.state_dict(), undisturbed.model.state_dict())


def test_an_average_goes_to_lightning_as_weights_alone(whole, tmp_path):
    wanted = options(tmp_path / "ema.ckpt", format="lightning", prefix="model.", ema=True)
    (file,), notes = export(whole.checkpoint, wanted)
    assert "weights alone" in notes[0]
    found = Lit.load_from_checkpoint(file, map_location="cpu").model.state_dict()
    export(whole.checkpoint, options(tmp_path / "ema.safetensors", ema=True))
    assert_same(dict(found), load_file(tmp_path / "ema.safetensors"))
