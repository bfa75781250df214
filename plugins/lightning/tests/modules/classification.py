"""Classification with torchmetrics, dropout, a step-wise schedule and every stage."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from modules.data import CLASSES, FEATURES


class Classifier(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.05, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, CLASSES),
        )
        self.train_accuracy = MulticlassAccuracy(CLASSES)
        self.val_metrics = MetricCollection(
            {"acc": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}, prefix="val/"
        )
        self.val_mean = MeanMetric()
        self.test_accuracy = MulticlassAccuracy(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train/acc", self.train_accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.val_metrics.update(logits, y)
        self.val_mean(loss, weight=len(y))
        self.log_dict(self.val_metrics, on_epoch=True)
        self.log("val/mean", self.val_mean, prog_bar=True)
        self.log("val/loss", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.test_accuracy(self(batch[0]), batch[1])
        self.log("test/acc", self.test_accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.hparams.lr,
            total_steps=int(self.trainer.estimated_stepping_batches),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "rate"},
        }
