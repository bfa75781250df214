"""Every documented flag of ``self.log``, from every place that may log."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from modules.data import CLASSES, FEATURES, samples

STEP_AND_EPOCH = [(True, True), (True, False), (False, True), (None, None), (None, True)]


class EveryFlag(L.LightningModule):
    """Logs whatever may be logged; the loss alone trains."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(FEATURES, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.mean = MeanMetric()
        self.largest = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def everything(self, stage: str, loss: Tensor, batch: Any) -> None:
        log = self.log
        for on_step, on_epoch in STEP_AND_EPOCH:
            log(f"{stage}/{on_step}-{on_epoch}", loss, on_step=on_step, on_epoch=on_epoch)
        log(f"{stage}/bar", loss, prog_bar=True)
        log(f"{stage}/not to loggers", loss, logger=False, on_epoch=True)
        for how in ("mean", "min", "max", "sum", torch.max):
            name = how if isinstance(how, str) else "torch"
            log(f"{stage}/{name}", loss, reduce_fx=how, on_step=False, on_epoch=True)
        log(f"{stage}/weighed", loss, batch_size=3, on_step=True, on_epoch=True)
        log(f"{stage}/synced", loss, sync_dist=True, on_step=True, on_epoch=True)
        log(f"{stage}/summed", loss, sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=True)
        log(f"{stage}/rank zero", loss, rank_zero_only=True)
        log(f"{stage}/graph", loss, enable_graph=True, on_step=True, on_epoch=True)
        log(f"{stage}/number", 2.5, on_step=True, on_epoch=True)
        log(f"{stage}/integer", 3, on_epoch=True)
        log(f"{stage}/tensor", torch.tensor(4), on_epoch=True)
        self.log_dict({f"{stage}/a": loss, f"{stage}/b": 2 * loss}, on_epoch=True, on_step=False)
        self.mean.update(loss.detach())
        log(f"{stage}/metric", self.mean, on_step=False, on_epoch=True)
        self.largest(loss.detach())
        log(f"{stage}/attribute", self.largest, metric_attribute="largest", on_epoch=True)
        self.accuracy(self(batch[0]), batch[1])
        log(f"{stage}/accuracy", self.accuracy, on_step=stage == "train", on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.everything("train", loss, batch)
        if batch_idx % 2:
            self.log("sometimes", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.everything("val", loss, batch)
        self.log(f"own {dataloader_idx}", loss, add_dataloader_idx=False)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.everything("test", F.cross_entropy(self(batch[0]), batch[1]), batch)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        size = self.hparams.batch_size
        return DataLoader(samples(18, seed=1), batch_size=size, shuffle=True)

    def val_dataloader(self) -> list[DataLoader[tuple[Tensor, ...]]]:
        size = self.hparams.batch_size
        return [DataLoader(samples(count, seed=2), batch_size=size) for count in (10, 8)]

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(samples(10, seed=3), batch_size=self.hparams.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    # -- hooks that may log -----------------------------------------------------------------------

    def on_train_start(self) -> None:
        self.log("hook/train_start", 1.0)

    def on_train_epoch_start(self) -> None:
        self.log("hook/train_epoch_start", float(self.current_epoch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("hook/batch_start", float(batch_idx), on_step=True, on_epoch=True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("hook/before_backward", loss)

    def on_after_backward(self) -> None:
        self.log("hook/gradient", self.layer.weight.grad.abs().max())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("hook/rate", optimizer.param_groups[0]["lr"])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("hook/zero_grad", 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook/batch_end", outputs["loss"], on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("hook/train_epoch_end", float(self.global_step))
        self.log_dict({"hook/again": 1.0}, prog_bar=True)

    def on_validation_start(self) -> None:
        self.log("hook/validation_start", 1.0)

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log("hook/validation_batch_end", outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("hook/validation_epoch_end", float(self.current_epoch), prog_bar=True)
