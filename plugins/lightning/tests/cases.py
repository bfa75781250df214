"""What is recorded: a module, its data, callbacks and the trainer's flags, by a name in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as parts
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    ManualOptimBoringModel,
)
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer
from modules import variations
from modules.autoencoder import AutoEncoder, Pairs
from modules.classification import Classifier
from modules.data import Samples
from modules.finetuning import FineTuned, Milestones
from modules.gan import GAN
from modules.logged import EveryFlag
from modules.optimizers import FORMS, MANUAL_FORMS, ByEpoch, Configurable, Manual, OwnStep, sgd
from modules.tbptt import Tbptt
from torch.utils.data import DataLoader, IterableDataset

CORPUS_WORDS = 21
"""Of ``write_corpus``: 20 words and the end of a line."""


@dataclass(frozen=True)
class Case:
    """``flags`` are arguments of ``lightning.Trainer``; ``stages`` run in this order.

    ``unused`` says that a backward pass does not reach every parameter, which DDP must be told;
    ``refused`` what Lightning says to more than one process.
    """

    module: Callable[[], L.LightningModule]
    data: Callable[[], L.LightningDataModule | None] = Samples
    callbacks: Callable[[], list[L.Callback]] = list
    flags: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[str, ...] = ("fit",)
    unused: bool = False
    refused: str = ""


def nothing() -> None:
    """A module that has its loaders itself."""


class Endless(IterableDataset[Any]):
    """Samples without a length; every process reads the same."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(4)
        for _ in range(self.count):
            x = torch.randn(6, generator=generator)
            yield x, x[:3].argmax()


class Streams(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Endless(18), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Endless(8), batch_size=4)


DEMOS = {
    "boring": Case(BoringModel, nothing, flags={"max_epochs": 2, "limit_train_batches": 5}),
    "boring, all stages": Case(
        BoringModel,
        BoringDataModule,
        flags={"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 3},
        stages=("fit", "validate", "test", "predict"),
    ),
    "boring, by hand": Case(
        ManualOptimBoringModel, nothing, flags={"max_epochs": 1, "limit_train_batches": 5}
    ),
    "boring, without a length": Case(
        BoringModel,
        BoringDataModuleNoLen,
        flags={"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 3},
    ),
    "transformer": Case(
        partial(LightningTransformer, vocab_size=CORPUS_WORDS), nothing, flags={"max_steps": 3}
    ),
    "lstm": Case(
        partial(LightningLSTM, vocab_size=CORPUS_WORDS),
        nothing,
        flags={"max_steps": 2, "use_distributed_sampler": False},
    ),
}
"""Lightning's own demos."""

MODULES = {
    "gan": Case(GAN, flags={"max_epochs": 2}, unused=True),
    "autoencoder": Case(AutoEncoder, Pairs, flags={"max_epochs": 3}, stages=("fit", "predict")),
    "fine-tuning": Case(
        FineTuned,
        callbacks=lambda: [Milestones(), parts.LearningRateMonitor()],
        flags={"max_epochs": 3},
        unused=True,
    ),
    "tbptt": Case(Tbptt, nothing, flags={"max_epochs": 2}),
    "classification": Case(
        Classifier,
        callbacks=lambda: [
            parts.EarlyStopping("val/loss", patience=3),
            parts.LearningRateMonitor("step", log_momentum=True),
        ],
        flags={"max_epochs": 2},
        stages=("fit", "validate", "test", "predict"),
    ),
}
"""In the style of the documentation."""

_TWO = {"max_epochs": 2}

LOGGING = {
    "every flag of log": Case(EveryFlag, nothing, flags=_TWO, stages=("fit", "validate", "test")),
    "every flag, at every second step": Case(
        EveryFlag, nothing, flags={**_TWO, "log_every_n_steps": 2, "accumulate_grad_batches": 2}
    ),
}

OPTIMIZERS = {
    **{
        f"optimizers: {name}": Case(partial(Configurable, form), flags=_TWO)
        for name, form in FORMS.items()
    },
    **{
        f"by hand: {name}": Case(partial(Manual, form), flags=_TWO)
        for name, form in MANUAL_FORMS.items()
    },
    "optimizers: a step of one's own": Case(
        partial(OwnStep, lambda m: (o := [sgd(m)], [ByEpoch(o[0], 1)])), flags=_TWO
    ),
}

_PLAIN = variations.Plain

FLAGS = {
    "flags: accumulation": Case(_PLAIN, flags={**_TWO, "accumulate_grad_batches": 4}),
    "flags: accumulation that a callback changes": Case(
        _PLAIN,
        callbacks=lambda: [parts.GradientAccumulationScheduler({0: 2, 1: 3})],
        flags=_TWO,
    ),
    "flags: clipping by norm": Case(_PLAIN, flags={**_TWO, "gradient_clip_val": 0.1}),
    "flags: clipping by value": Case(
        _PLAIN,
        flags={**_TWO, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "flags: numbers of batches": Case(
        _PLAIN, flags={**_TWO, "limit_train_batches": 3, "limit_val_batches": 2}
    ),
    "flags: parts of the batches": Case(
        _PLAIN, flags={**_TWO, "limit_train_batches": 0.5, "limit_val_batches": 0.7}
    ),
    "flags: no validation": Case(_PLAIN, flags={**_TWO, "limit_val_batches": 0}),
    "flags: validation every two steps": Case(_PLAIN, flags={**_TWO, "val_check_interval": 2}),
    "flags: validation at parts of an epoch": Case(
        _PLAIN, flags={**_TWO, "val_check_interval": 0.4}
    ),
    "flags: validation across epochs": Case(
        _PLAIN,
        flags={**_TWO, "val_check_interval": 4, "check_val_every_n_epoch": None},
    ),
    "flags: validation every second epoch": Case(
        _PLAIN, flags={"max_epochs": 3, "check_val_every_n_epoch": 2}
    ),
    "flags: no sanity check": Case(_PLAIN, flags={**_TWO, "num_sanity_val_steps": 0}),
    "flags: a whole sanity check": Case(_PLAIN, flags={**_TWO, "num_sanity_val_steps": -1}),
    "flags: steps": Case(_PLAIN, flags={"max_steps": 8}),
    "flags: steps of accumulated batches": Case(
        _PLAIN, flags={"max_steps": 4, "accumulate_grad_batches": 2}
    ),
    "flags: overfitting": Case(_PLAIN, flags={**_TWO, "overfit_batches": 2}),
    "flags: a rehearsal": Case(_PLAIN, flags={"fast_dev_run": True}),
    "flags: loaders anew": Case(_PLAIN, flags={**_TWO, "reload_dataloaders_every_n_epochs": 1}),
    "flags: the iterator": Case(variations.TakesTheIterator, flags=_TWO),
    "flags: a stream": Case(_PLAIN, Streams, flags=_TWO),
    "flags: no inference mode": Case(_PLAIN, flags={**_TWO, "inference_mode": False}),
    "flags: bf16-mixed": Case(_PLAIN, flags={**_TWO, "precision": "bf16-mixed"}),
    "flags: bf16-true": Case(_PLAIN, flags={**_TWO, "precision": "bf16-true"}),
    "flags: at least so many epochs": Case(
        _PLAIN,
        callbacks=lambda: [parts.EarlyStopping("val_loss", patience=1, min_delta=10.0)],
        flags={"max_epochs": 5, "min_epochs": 3},
    ),
}

HOOKS = {
    f"hooks: {cls.__name__}": Case(
        cls,
        flags={"max_epochs": 3},
        unused=cls is variations.BringsCallbacks,
        refused="returning None" if cls is variations.SkipsBatches else "",
    )
    for cls in (
        variations.SkipsBatches,
        variations.EndsEpochs,
        variations.Stops,
        variations.WarmsUp,
        variations.EverySecond,
        variations.OwnBackward,
        variations.TransfersBatches,
        variations.BringsCallbacks,
        variations.ReturnsMore,
        variations.StepsByClosure,
        variations.DrawsAtRandom,
    )
}

CALLBACKS = {
    "callbacks: checkpoints": Case(
        variations.Saves,
        callbacks=lambda: [
            parts.ModelCheckpoint(monitor="val_loss", save_last=True, save_top_k=1),
            parts.ModelCheckpoint(every_n_train_steps=4, filename="at-{step}"),
        ],
        flags=_TWO,
    ),
    "callbacks: averaging": Case(
        _PLAIN,
        callbacks=lambda: [parts.StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
        flags={"max_epochs": 3},
    ),
    "callbacks: timer and monitors": Case(
        _PLAIN,
        callbacks=lambda: [parts.Timer(), parts.LearningRateMonitor(), parts.LambdaCallback()],
        flags=_TWO,
    ),
}

CASES = {**DEMOS, **MODULES, **LOGGING, **OPTIMIZERS, **FLAGS, **HOOKS, **CALLBACKS}
