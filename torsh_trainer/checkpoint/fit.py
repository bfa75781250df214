"""Whether a checkpoint fits the state of a run, and the two put together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torsh_trainer.checkpoint.plain import Leaf, Path, dotted_name, holds_tensors, put
from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.errors import ConfigError

FREE = ("callbacks", "config", "feed", "loop", "rng", "schedule", "setup", "task")
"""Parts of a state that come back exactly as they were saved, whatever the run holds there now: a
callback may be new, and random number generators belong to ranks that may no longer exist."""

_SHOWN = 5


class Shape(NamedTuple):
    """Global shape and type of a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.size)} {str(self.dtype).removeprefix('torch.')}"


Shapes = Mapping[Path, Shape]


class Fit(NamedTuple):
    """How the tensors of a checkpoint differ from those that a run holds.

    ``missing`` are the run's alone, ``unexpected`` the checkpoint's, with their shapes; ``other``
    has (saved, wanted) of those whose shape or kind differs.
    """

    missing: tuple[Path, ...] = ()
    unexpected: Mapping[Path, Shape] = {}
    other: Mapping[Path, tuple[Shape, Shape]] = {}

    @property
    def paths(self) -> tuple[Path, ...]:
        """All that differ."""
        return (*self.missing, *self.unexpected, *self.other)

    def below(self, *prefixes: Path) -> Fit:
        """The part of it that lies below one of ``prefixes``."""
        return Fit(
            tuple(p for p in self.missing if is_below(p, prefixes)),
            {p: shape for p, shape in self.unexpected.items() if is_below(p, prefixes)},
            {p: pair for p, pair in self.other.items() if is_below(p, prefixes)},
        )

    def phrases(self) -> list[str]:
        """What differs, in words: one phrase for each way."""
        shapes = (
            f"{dotted_name(p)} ({saved} there, {wanted} here)"
            for p, (saved, wanted) in self.other.items()
        )
        phrases = [
            _list_names("missing from it", map(dotted_name, self.missing)),
            _list_names("only in it", map(dotted_name, self.unexpected)),
            _list_names("other shapes", shapes),
        ]
        return [phrase for phrase in phrases if phrase]


def shape_of(tensor: Leaf) -> Shape:
    """Of the whole tensor, also when this rank holds a shard."""
    if isinstance(tensor, FlatShard):
        return Shape(tuple(tensor.global_shape), tensor.tensor.dtype)
    return Shape(tuple(tensor.shape), tensor.dtype)


def is_free(path: Path) -> bool:
    """True for what comes back as saved."""
    return path[0] in FREE


def is_below(path: Path, prefixes: Collection[Path]) -> bool:
    """True when one of ``prefixes`` leads to ``path``, or is it."""
    return any(path[: len(prefix)] == prefix for prefix in prefixes)


def without(state: Mapping[str, Any], prefixes: Collection[Path], at: Path = ()) -> dict[str, Any]:
    """``state`` less what lies below ``prefixes``."""
    kept = {key: value for key, value in state.items() if not is_below((*at, key), prefixes)}
    for key, value in kept.items():
        path = (*at, key)
        if isinstance(value, Mapping) and any(p[: len(path)] == path for p in prefixes):
            kept[key] = without(value, prefixes, path)
    return kept


def fit(saved: Shapes, wanted: Iterable[Shapes]) -> Fit:
    """Compares what a checkpoint holds with what all ranks together want of it.

    A parameter without any optimizer state in the checkpoint is no difference: it had not been
    updated when the checkpoint was saved.
    """
    templates: dict[Path, Shape] = {}
    for shapes in wanted:
        templates.update({path: shape for path, shape in shapes.items() if not is_free(path)})
    kept = {path: shape for path, shape in saved.items() if not is_free(path)}
    slots = {slots_of(path) for path in kept}
    return Fit(
        tuple(p for p in templates if p not in kept and slots_of(p) in slots | {None}),
        {path: shape for path, shape in kept.items() if path not in templates},
        {
            p: (kept[p], templates[p])
            for p in templates
            if p in kept and not _alike(kept[p], templates[p])
        },
    )


def with_late_slots(
    engine: Mapping[str, Any], fit: Fit, held: Mapping[str, Collection[str]]
) -> dict[str, Any] | None:
    """``engine``, a state to be filled, with the slots of optimizers that the checkpoint alone has.

    An optimizer may make a slot in a later step than the first, as one that looks ahead every five
    steps does. ``held`` names, by optimizer, the parameters whose state belongs to this rank. A
    slot is cut as another one of that shape is, else as the parameter is. None where nothing is
    added; what has no such model stays out, and does not fit.
    """
    optimizers = {name: dict(one) for name, one in engine["optimizer"].items()}
    added = False
    for path, shape in fit.unexpected.items():
        at = slots_of(path)
        if at is None or len(path) != len(at) + 1 or path[2] not in optimizers:
            continue
        name, parameter = path[2], path[4]
        states = dict(optimizers[name]["state"])
        slots = dict(states.get(parameter, {}))
        of_model = engine["model"].get(parameter)
        models = [*slots.values(), *([of_model] if parameter in held.get(name, ()) else [])]
        slot = _like_one_of(models, shape)
        if slot is not None:
            states[parameter] = {**slots, path[5]: slot}
            optimizers[name]["state"] = states
            added = True
    return {**engine, "optimizer": optimizers} if added else None


def _like_one_of(models: Iterable[Any], shape: Shape) -> Leaf | None:
    """Zeros of that shape, cut as the first of ``models`` that has it."""
    for model in models:
        if isinstance(model, Leaf) and shape_of(model).size == shape.size:
            if isinstance(model, FlatShard):
                return model._replace(tensor=torch.zeros_like(model.tensor, dtype=shape.dtype))
            return torch.zeros_like(model, dtype=shape.dtype)
    return torch.zeros((), dtype=shape.dtype) if shape.size == () and list(models) else None


def check_fit(saved: Shapes, wanted: Iterable[Shapes], checkpoint: str) -> None:
    """Makes sure that there is no difference; see ``fit``.

    Raises:
        ConfigError: something is missing, unexpected or of another shape; the message names it.
    """
    found = fit(saved, wanted)
    if found.paths:
        raise ConfigError(
            f"the checkpoint {checkpoint} does not fit this run: " + ". ".join(found.phrases()),
            fix="resume with the model and optimizer that it was saved with, "
            "or start with checkpoint.resume=never",
            missing=[dotted_name(path) for path in found.missing],
            unexpected=[dotted_name(path) for path in found.unexpected],
            shapes=[dotted_name(path) for path in found.other],
        )


def join(
    state: Mapping[str, Any], saved: Mapping[str, Any], tensors: Mapping[Path, Leaf]
) -> tuple[dict[str, Any], list[str]]:
    """The state that a run goes on from, and the names of plain values that only ``state`` had.

    Plain values come as ``saved``. Where a dict of ``state`` holds tensors, its keys are those of
    both; any other dict is one value.
    """
    kept: list[str] = []
    joined = _join(state, saved, (), kept)
    for path, tensor in tensors.items():
        put(joined, path, tensor)
    return joined, kept


def _join(
    state: Mapping[str, Any], saved: Mapping[str, Any], at: Path, kept: list[str]
) -> dict[str, Any]:
    joined = dict(saved)
    for key, value in state.items():
        path = (*at, key)
        if is_free(path):
            joined.setdefault(key, {})
        elif isinstance(value, Mapping) and holds_tensors(value):
            if key in saved or slots_of(path) is None:
                joined[key] = _join(value, saved.get(key, {}), path, kept)
        elif not isinstance(value, Leaf) and key not in saved and slots_of(path) is None:
            joined[key] = value
            kept.append(dotted_name(path))
    return joined


def slots_of(path: Path) -> Path | None:
    """The parameter of an optimizer to whose state ``path`` leads, if it does."""
    for i in range(len(path) - 3):
        if path[i] == "optimizer" and path[i + 2] == "state":
            return path[: i + 4]
    return None


def _alike(saved: Shape, wanted: Shape) -> bool:
    """Floating-point types convert into one another, other types do not."""
    same_kind = saved.dtype == wanted.dtype or (
        saved.dtype.is_floating_point and wanted.dtype.is_floating_point
    )
    return saved.size == wanted.size and same_kind


def _list_names(title: str, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{title}: " + ", ".join(names[:_SHOWN]) + more
