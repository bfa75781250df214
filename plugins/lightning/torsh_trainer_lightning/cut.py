"""What does not go with a module that is cut over the processes, said before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

from torsh_trainer.errors import Unsupported
from torsh_trainer_lightning.state import is_apart


def refuse(trainer: Trainer, module: LightningModule) -> None:
    """Before a fit, once ``module`` is as it will be trained.

    Raises:
        Unsupported: it is cut, and a callback averages its weights; or checkpoints would hold a
            part of it among their hyperparameters.
    """
    if not is_apart(module):
        return
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise Unsupported(
                f"{type(callback).__name__} averages whole weights, and this strategy cuts them "
                "over the processes",
                fix="use strategy=ddp, or leave the callback out",
            )
    if trainer.checkpoint_callbacks:
        refuse_parameters(module)


def refuse_parameters(module: LightningModule) -> None:
    """Raises Unsupported where hyperparameters hold a part of the module that is cut."""
    for name, value in module.hparams.items():
        if any(map(is_apart, _modules(value))):
            raise Unsupported(
                f"the hyperparameter {name!r} is a part of the module, which this strategy cuts "
                "over the processes: no checkpoint can hold it",
                fix=f'write self.save_hyperparameters(ignore=["{name}"])',
            )


def _modules(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _modules(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _modules(part)
