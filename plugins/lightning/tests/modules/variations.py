"""Hooks that change what a loop does."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from modules.optimizers import Configurable, sgd


class Plain(Configurable):
    def __init__(self) -> None:
        super().__init__(sgd)


class SkipsBatches(Plain):
    """Some batches give no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class EndsEpochs(Plain):
    """Every epoch ends before its fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class Stops(Plain):
    """Asks the trainer to stop, as the documentation says."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 8:
            self.trainer.should_stop = True


class WarmsUp(Plain):
    """Overrides ``optimizer_step``, as the documentation's warm-up does."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        scale = min(1.0, float(self.trainer.global_step + 1) / 5.0)
        for group in optimizer.param_groups:
            group["lr"] = scale * 0.1


class EverySecond(Plain):
    """Steps at every second batch, and runs the closure of the others."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class OwnBackward(Plain):
    """Overrides ``backward``, ``optimizer_zero_grad`` and clipping."""

    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(
            optimizer,
            gradient_clip_val=0.5 * (gradient_clip_val or 1.0),
            gradient_clip_algorithm=gradient_clip_algorithm or "norm",
        )


class TransfersBatches(Plain):
    """Changes batches on their way to the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]


class BringsCallbacks(Plain):
    """``configure_callbacks`` beside those of the trainer; ``configure_model`` builds a layer."""

    def configure_model(self) -> None:
        if not hasattr(self, "third"):
            self.third = torch.nn.Linear(2, 2)

    def configure_callbacks(self) -> Any:
        return L.pytorch.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)


class ReturnsMore(Plain):
    """A dictionary from every step, read in the hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": super().training_step(batch, batch_idx), "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        super().validation_step(batch, batch_idx)
        return {"x": batch[0].sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("given", float(outputs["index"]))


class StepsByClosure(Plain):
    """LBFGS, which calls the closure as often as it likes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Saves(Plain):
    """Has its say in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.loaded: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = int(self.count)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]


class DrawsAtRandom(Plain):
    """Dropout in training, and draws in every stage: one stream of random numbers."""

    def loss(self, batch: Any) -> Tensor:
        x = torch.nn.functional.dropout(batch[0], 0.3, training=self.training)
        return super().loss([x + 0.01 * torch.randn_like(x), batch[1]])


class TakesTheIterator(Plain):
    """``dataloader_iter`` in place of a batch."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch[0]))
        return loss
