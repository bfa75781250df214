"""Every return form of ``configure_optimizers``, over one small module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from modules.data import CLASSES, FEATURES


class Configurable(L.LightningModule):
    """Cross entropy under what ``form`` returns."""

    def __init__(self, form: Callable[[L.LightningModule], Any]) -> None:
        super().__init__()
        self.form = form
        self.first = torch.nn.Linear(FEATURES, 5)
        self.second = torch.nn.Linear(5, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.second(torch.tanh(self.first(batch[0]))), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.form(self)


class Manual(Configurable):
    """The same by hand: every optimizer steps in turn, schedulers at the end of an epoch."""

    def __init__(self, form: Callable[[L.LightningModule], Any]) -> None:
        super().__init__(form)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss)

    def on_train_epoch_end(self) -> None:
        schedulers = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(self.trainer.callback_metrics["train_loss"])
            elif scheduler is not None:
                scheduler.step()


class ByEpoch(StepLR):
    """A schedule that wants to be told the epoch, as timm's do."""

    def step(self, epoch: int | None = None) -> None:  # type: ignore[override]
        if epoch is not None:
            self.last_epoch = epoch
        super().step()


class OwnStep(Configurable):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)


def sgd(module: L.LightningModule) -> SGD:
    return SGD(module.parameters(), lr=0.1, momentum=0.5)


def _with(make: Callable[[Any], Any], **more: Any) -> Callable[[L.LightningModule], Any]:
    """The dictionary of an optimizer and the dictionary of its schedule."""

    def form(module: L.LightningModule) -> Any:
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **more}}

    return form


def _lists(module: L.LightningModule) -> Any:
    optimizer = sgd(module)
    return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


def _lists_of_dictionaries(module: L.LightningModule) -> Any:
    optimizer = sgd(module)
    each_step = {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step", "name": "fast"}
    return [optimizer], [each_step, {"scheduler": StepLR(optimizer, 1), "frequency": 2}]


def _dictionary(module: L.LightningModule) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)}


def _plateau(module: L.LightningModule) -> Any:
    optimizer = sgd(module)
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


def _groups(module: L.LightningModule) -> Any:
    return Adam(
        [
            {"params": module.first.parameters(), "lr": 0.02, "weight_decay": 0.1},
            {"params": module.second.parameters()},
        ],
        lr=0.01,
    )


def _sequential(optimizer: Any) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=3), ConstantLR(optimizer, 0.5, total_iters=9)]
    return SequentialLR(optimizer, parts, milestones=[3])


FORMS: dict[str, Callable[[L.LightningModule], Any]] = {
    "an optimizer": sgd,
    "groups": _groups,
    "a list of one": lambda module: [sgd(module)],
    "a tuple of one": lambda module: (sgd(module),),
    "two lists": _lists,
    "two lists, of dictionaries": _lists_of_dictionaries,
    "a dictionary without a schedule": lambda module: {"optimizer": sgd(module)},
    "a dictionary": _dictionary,
    "a list of one dictionary": lambda module: [_dictionary(module)],
    "plateau, monitored beside": _plateau,
    "plateau, every epoch": _with(
        lambda opt: ReduceLROnPlateau(opt, patience=0, threshold=0.5), monitor="val_loss"
    ),
    "plateau, every second step": _with(
        lambda opt: ReduceLROnPlateau(opt, patience=0, threshold=0.5),
        monitor="train_loss",
        interval="step",
        frequency=2,
    ),
    "plateau, of what is not there": _with(
        lambda opt: ReduceLROnPlateau(opt, patience=0), monitor="nothing", strict=False
    ),
    "every step": _with(lambda opt: ExponentialLR(opt, 0.8), interval="step"),
    "every third step": _with(lambda opt: StepLR(opt, 1, 0.5), interval="step", frequency=3),
    "every second epoch": _with(lambda opt: StepLR(opt, 1, 0.5), frequency=2),
    "one cycle": _with(lambda opt: OneCycleLR(opt, 0.3, total_steps=40), interval="step"),
    "restarts": _with(lambda opt: CosineAnnealingWarmRestarts(opt, 2), interval="step"),
    "a function": _with(lambda opt: LambdaLR(opt, lambda epoch: 0.5**epoch)),
    "in sequence": _with(_sequential, interval="step"),
    "nothing": lambda module: None,
}
"""Forms for automatic optimization, which knows one optimizer."""


def _two(module: L.LightningModule) -> list[Any]:
    return [SGD(module.first.parameters(), lr=0.1), Adam(module.second.parameters(), lr=0.02)]


def _two_and_schedules(module: L.LightningModule) -> Any:
    optimizers = _two(module)
    return optimizers, [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]


def _two_dictionaries(module: L.LightningModule) -> Any:
    first, second = _two(module)
    plateau = ReduceLROnPlateau(second, patience=0, threshold=0.5)
    return (
        {"optimizer": first, "lr_scheduler": StepLR(first, 1, gamma=0.5)},
        {"optimizer": second, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"}},
    )


MANUAL_FORMS: dict[str, Callable[[L.LightningModule], Any]] = {
    "one": sgd,
    "two": _two,
    "two, and schedules": _two_and_schedules,
    "two dictionaries": _two_dictionaries,
    "a list without schedules": lambda module: (_two(module), []),
}
"""Forms for manual optimization."""
