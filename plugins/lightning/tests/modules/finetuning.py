"""Fine-tuning: a frozen backbone with batch norms, of which a callback frees a part later."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from modules.data import CLASSES, FEATURES


class FineTuned(L.LightningModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.1)]


class Milestones(BaseFinetuning):
    """Frees the backbone's last layer after ``epoch`` epochs, at a tenth of the rate."""

    def __init__(self, epoch: int = 1) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(
                pl_module.backbone[-1], optimizer, initial_denom_lr=10.0
            )


class Stack(L.LightningModule):
    """Without anything that depends on how a batch is cut over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.2, momentum=0.9, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Thaws(BaseFinetuning):
    """Begins with the head alone, frees the backbone layer by layer, and freezes the head."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(
                pl_module.backbone[-1], optimizer, initial_denom_lr=2.0
            )
        if epoch == 2:
            self.freeze(pl_module.head)
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer, lr=0.1)
        if epoch == 3:
            self.make_trainable(pl_module.head)


class Freezes(BaseFinetuning):
    """All of it trains at first, and the head no longer after an epoch."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        pass

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        if epoch == 1:
            self.freeze(pl_module.head)


class ThawsWithin(Stack):
    """Frees and freezes in its own step, before it calls its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            self.backbone.requires_grad_(True)
        if self.global_step == 5:
            self.head.requires_grad_(False)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


class StackOfAll(Stack):
    """Its optimizer has all parameters, those that do not train yet too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class ThawsAll(BaseFinetuning):
    """Freezes everything before training, and frees it as training begins."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module, train_bn=False)

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        if epoch == 0:
            self.make_trainable(pl_module)
