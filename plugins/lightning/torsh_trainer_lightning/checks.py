"""A module, a data module and callbacks, looked at before anything runs."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule

from torsh_trainer.errors import ConfigError

log = logging.getLogger(__name__)

_STEPS = {
    "fit": "training_step",
    "evaluate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
_LOADERS = {
    "fit": "train_dataloader",
    "evaluate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
_NAMED = ("setup", "teardown")
"""Hooks that Lightning calls with their argument by name."""
_ALIKE = 0.8
"""From this ratio on a hook is taken for another one's name: of difflib, 1 for equal names."""


def check(
    module: Any, datamodule: Any, callbacks: Iterable[Any], loggers: Iterable[Any], stages: Any
) -> None:
    """Refuses what would fail in the middle of a run.

    Raises:
        ConfigError: something is not of its kind, lacks what a stage needs, or has a hook that
            Lightning cannot call.
    """
    from lightning.pytorch.loggers import Logger

    _check_kind(module, LightningModule, "task.module")
    if datamodule is not None:
        _check_kind(datamodule, LightningDataModule, "task.datamodule")
    for callback in callbacks:
        _check_kind(callback, Callback, "task.callbacks")
    for logger in loggers:
        _check_kind(logger, Logger, "task.loggers")
    for stage in stages:
        _check_stage(stage, module, datamodule)
    for thing, base in ((module, LightningModule), (datamodule, LightningDataModule)):
        if thing is not None:
            _check_hooks(thing, base)
            _warn_of_uncalled(thing, base)
    for callback in callbacks:
        _check_hooks(callback, Callback)
        _warn_of_uncalled(callback, Callback)


def _check_kind(thing: Any, kind: type, option: str) -> None:
    if not isinstance(thing, kind):
        raise ConfigError(
            f"{option} makes a {type(thing).__name__}, which is no {kind.__name__}",
            fix=f"name a class that inherits from lightning.{kind.__name__}",
        )


def _check_stage(stage: str, module: LightningModule, datamodule: Any) -> None:
    step, loader = _STEPS[stage], _LOADERS[stage]
    name = type(module).__name__
    if stage != "predict" and not _has(module, step, LightningModule):
        raise ConfigError(
            f"{name} has no {step}, which trainer.stages=[{stage}] runs",
            fix=f"define {step}(self, batch, batch_idx)",
        )
    if stage == "fit" and not _has(module, "configure_optimizers", LightningModule):
        raise ConfigError(
            f"{name} has no configure_optimizers, so nothing would be trained",
            fix="define configure_optimizers(self)",
        )
    given = datamodule is not None and _has(datamodule, loader, LightningDataModule)
    if not given and not _has(module, loader, LightningModule):
        whose = name if datamodule is None else f"{type(datamodule).__name__}, like {name},"
        raise ConfigError(
            f"{whose} has no {loader}, which trainer.stages=[{stage}] needs",
            fix=f"define {loader}(self)"
            + (", or give a task.datamodule that has one" if datamodule is None else ""),
        )


def _has(thing: Any, name: str, base: type) -> bool:
    if name in vars(thing):
        return True
    return getattr(type(thing), name, None) is not getattr(base, name, None)


def _check_hooks(thing: Any, base: type) -> None:
    for name, reference in inspect.getmembers(base, inspect.isfunction):
        if name.startswith("_") or not (name.startswith("on_") or name in _NAMED):
            continue
        hook = getattr(thing, name)
        if getattr(hook, "__func__", None) is reference or not callable(hook):
            continue
        wanted = [p for p in inspect.signature(reference).parameters if p != "self"]
        required = [
            p.name
            for p in inspect.signature(reference).parameters.values()
            if p.name != "self" and p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        if not _can_call(hook, required, by_name=name in _NAMED):
            raise ConfigError(
                f"{type(thing).__name__}.{name}{inspect.signature(hook)} cannot be called as "
                f"Lightning calls it",
                fix=f"write def {name}({', '.join(['self', *wanted])})",
            )


def _warn_of_uncalled(thing: Any, base: type) -> None:
    """Names hooks that look like Lightning's and are none: it says nothing of them itself."""
    hooks = [name for name in dir(base) if name.startswith("on_")]
    kinds = [kind for kind in type(thing).__mro__ if issubclass(kind, base) and kind is not base]
    for name in sorted({name for kind in kinds for name in vars(kind)} - set(hooks)):
        close = difflib.get_close_matches(name, hooks, n=2, cutoff=_ALIKE)
        if name.startswith("on_") and callable(getattr(thing, name)) and close:
            log.warning(
                "%s.%s: Lightning calls no hook of that name; did you mean %s?",
                type(thing).__name__,
                name,
                " or ".join(close),
            )


def _can_call(hook: Any, names: list[str], *, by_name: bool) -> bool:
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return True
    try:
        if by_name and names[-1:] == ["stage"]:
            signature.bind(*names[:-1], stage=None)
        else:
            signature.bind(*names)
    except TypeError:
        return False
    return True
