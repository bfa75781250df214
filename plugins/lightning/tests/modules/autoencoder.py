"""An autoencoder: a dictionary of training loaders, two of validation, a plateau schedule."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from modules.data import FEATURES, samples


class AutoEncoder(L.LightningModule):
    def __init__(self, width: int = 3, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, width))
        self.decoder = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def reconstruction(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(self(x)), x)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        clean, noisy = (self.reconstruction(batch[name][0]) for name in ("clean", "noisy"))
        self.log_dict({"clean": clean, "noisy": noisy}, on_step=True, on_epoch=True, batch_size=2)
        return {"loss": clean + 0.5 * noisy, "clean": clean.detach()}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.reconstruction(batch[0])
        self.log("val_loss", loss)
        self.log("val_whole", loss, add_dataloader_idx=False) if dataloader_idx == 0 else None
        return loss

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
                    optimizer, factor=0.5, patience=0, threshold=0.2
                ),
                "monitor": "val_loss/dataloader_idx_1",
                "frequency": 1,
                "interval": "epoch",
            },
        }


class Pairs(L.LightningDataModule):
    """Loaders of unequal length: the longer one sets the epoch, the shorter begins again."""

    def train_dataloader(self) -> CombinedLoader:
        loaders = {
            "clean": DataLoader(samples(12, seed=1), batch_size=2, shuffle=True),
            "noisy": DataLoader(samples(8, seed=2), batch_size=2, shuffle=True),
        }
        return CombinedLoader(loaders, mode="max_size_cycle")

    def val_dataloader(self) -> list[DataLoader[tuple[Tensor, ...]]]:
        return [DataLoader(samples(count, seed=3), batch_size=3) for count in (6, 7)]

    def predict_dataloader(self) -> list[DataLoader[tuple[Tensor, ...]]]:
        return self.val_dataloader()
