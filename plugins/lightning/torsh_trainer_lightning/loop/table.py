"""Which hooks of a module, its data module and callbacks are really there, found out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.profilers import PassThroughProfiler
from torch.optim import Optimizer

CallbackHook = Callable[..., Any]

_AROUND_OPTIMIZATION = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""A module that defines one of these is optimized by Lightning's own closures."""

_CALLBACKS_AROUND = (
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def defines(thing: Any, name: str, base: type) -> bool:
    """Whether ``thing`` has its own ``name``, other than what ``base`` gives it."""
    return name in vars(thing) or getattr(type(thing), name) is not getattr(base, name)


def hooks_of(callbacks: Sequence[Callback], name: str) -> list[CallbackHook]:
    """The hook ``name`` of those callbacks that define it, in their order."""
    return [getattr(c, name) for c in callbacks if defines(c, name, Callback)]


@dataclass(frozen=True)
class Table:
    """What a step has to call, for one epoch of training.

    ``direct`` says that nothing stands between the loss, its backward and the optimizer's step, so
    that the engine is asked straight away.
    """

    on_batch_start: list[CallbackHook]
    on_batch_end: list[CallbackHook]
    module_batch_start: Callable[..., Any] | None
    module_batch_end: Callable[..., Any] | None
    transfers: bool
    direct: bool
    profiles: bool

    @property
    def hears_of_end(self) -> bool:
        """Whether anybody is told what a batch came to."""
        return bool(self.on_batch_end) or self.module_batch_end is not None

    @classmethod
    def of(
        cls,
        module: LightningModule,
        datamodule: LightningDataModule | None,
        callbacks: Sequence[Callback],
        optimizers: Sequence[Optimizer],
        profiler: Any,
    ) -> Table:
        def own(name: str) -> Callable[..., Any] | None:
            return getattr(module, name) if defines(module, name, LightningModule) else None

        around = any(defines(module, name, LightningModule) for name in _AROUND_OPTIMIZATION)
        watched = any(hooks_of(callbacks, name) for name in _CALLBACKS_AROUND)
        given = [module] if datamodule is None else [module, datamodule]
        return cls(
            on_batch_start=hooks_of(callbacks, "on_train_batch_start"),
            on_batch_end=hooks_of(callbacks, "on_train_batch_end"),
            module_batch_start=own("on_train_batch_start"),
            module_batch_end=own("on_train_batch_end"),
            transfers=any(defines(one, name, DataHooks) for one in given for name in _TRANSFERS),
            direct=module.automatic_optimization
            and not around
            and not watched
            and all(map(_needs_no_closure, optimizers)),
            profiles=type(profiler) is not PassThroughProfiler,
        )


def _needs_no_closure(optimizer: Optimizer) -> bool:
    """torch's own optimizers all do without, but for L-BFGS."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS
