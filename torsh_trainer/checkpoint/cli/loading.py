"""The weights of a checkpoint, taken into a module of one's own, without a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torsh_trainer.checkpoint.cli.contents import Contents
from torsh_trainer.checkpoint.store.finding import find
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.tasks.weights import Report, ShapeMismatch, take_values

_WHERE = "give the path of a checkpoint (.../step-00000100) or of a run directory"


def load_weights(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    ema: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Copies a checkpoint's weights into ``model``: parameters, buffers and extra state.

    ``checkpoint`` is the path or URL (with ``storage_options``, as fsspec takes them) of a
    checkpoint, or of a run directory, which stands for its newest one. Whatever strategy saved it,
    on however many processes, the weights come whole, cast to the dtypes of ``model``, which may
    lie on any device. ``ema`` takes the moving average in place of the parameters. Every byte is
    checked first, and nothing is changed unless every name and shape fits.

    Raises:
        ConfigError: there is no checkpoint at that path, it does not fit the model, or it holds no
            moving average.
        ResourceError: the checkpoint is damaged or cannot be read.
    """
    path = _find_checkpoint(str(checkpoint), storage_options)
    contents = Contents.open(path, verified=False)  # it was found sound
    target = model.state_dict(keep_vars=True)
    _refuse_meta(model, target)
    averages = contents.averages if ema else {}
    if ema and (not averages or not contents.plain["engine"]["ema"].get("updates")):
        raise ConfigError(
            f"{path} holds no moving average",
            fix="leave ema out; trainer.ema_decay=0.999 keeps one",
        )
    entries = {**contents.model, **averages}
    for name, owner in _find_tied(target, [*averages, *entries]):
        if name not in entries or (owner in averages and name not in averages):
            entries[name] = entries[owner]
    shapes = {name: entry.shape for name, entry in entries.items()}
    _refuse_misfit(shapes, contents.extra_state, target, named=str(path))
    once = {entry.full_name: entry for entry in entries.values()}
    read = {entry.full_name: tensor for entry, tensor in contents.read(once.values())}
    values = {name: read[entry.full_name] for name, entry in entries.items()}
    take_values(model, {**values, **contents.extra_state}, strict=False)


def _find_checkpoint(checkpoint: str, storage_options: Mapping[str, Any] | None) -> Any:
    try:
        path = find(checkpoint, Path(), storage_options)
    except (ConfigError, ResourceError) as error:
        # Worded for checkpoint.resume, which there is none of here.
        sentence = error.sentence.removeprefix("checkpoint.resume=")
        damaged = "name another, or copy this one again"
        fix = _WHERE if isinstance(error, ConfigError) else damaged
        fix = error.fix if error.fix.startswith(("did you mean", "name a run")) else fix
        raise type(error)(sentence, fix=fix, **error.facts) from error
    if path is None:
        raise ConfigError(f"{checkpoint} is the path of no checkpoint", fix=_WHERE)
    return path


def _refuse_meta(model: nn.Module, target: Mapping[str, Any]) -> None:
    tensors = [value for value in target.values() if isinstance(value, Tensor)]
    if any(value.is_meta for value in tensors):
        raise ConfigError(
            f"the {type(model).__name__} lies on the meta device, where nothing is kept",
            fix="write model.to_empty(device='cpu') first",
        )


def _find_tied(target: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names of the model, each with the first of ``names`` that is the same tensor there."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name in names:
        if (place := _place(target.get(name))) is not None:
            first.setdefault(place, name)
    for name, value in target.items():
        owner = first.get(_place(value) or (0, ()))
        if owner is not None and owner != name:
            yield name, owner


def _place(value: Any) -> tuple[int, tuple[int, ...]] | None:
    if not isinstance(value, Tensor) or is_lazy(value) or not value.numel():
        return None
    return value.data_ptr(), tuple(value.shape)


def _refuse_misfit(
    shapes: Mapping[str, tuple[int, ...]],
    extra: Mapping[str, Any],
    target: Mapping[str, Any],
    *,
    named: str,
) -> None:
    """Raises unless names and shapes of the checkpoint are those of the model."""
    known = {**shapes, **extra}
    mismatched = tuple(
        ShapeMismatch(name, shapes[name], tuple(value.shape))
        for name, value in target.items()
        if name in shapes and isinstance(value, Tensor) and not is_lazy(value)
        if shapes[name] != tuple(value.shape)
    )
    report = Report(
        path=named,
        loaded=(),
        missing=tuple(name for name in target if name not in known),
        unexpected=tuple(name for name in known if name not in target),
        mismatched=mismatched,
        elements=(0, 0),
    )
    if not report.complete:
        differences = "; ".join(report.shortfalls()).replace("the file", "the checkpoint")
        raise ConfigError(
            f"{named} does not fit the model: {differences}",
            fix="build the module as the task's build_model does, and give it itself, not what "
            "wraps it (DDP, torch.compile)",
        )
