"""Whether a checkpoint fits the state of a run, and the two put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_trainer.checkpoint.plain import Path, dotted, holds_tensors, put
from torsh_trainer.errors import ConfigError

FREE = ("callbacks", "rng", "schedule", "task")
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


def shape_of(tensor: Tensor) -> Shape:
    """Of the whole tensor, also when this rank holds a shard."""
    return Shape(tuple(tensor.shape), tensor.dtype)


def is_free(path: Path) -> bool:
    """True for what comes back as saved."""
    return path[0] in FREE


def check_fit(saved: Shapes, wanted: Iterable[Shapes], checkpoint: str) -> None:
    """Compares what a checkpoint holds with what all ranks together want of it.

    A parameter without any optimizer state in the checkpoint is no difference: it had not been
    updated when the checkpoint was saved.

    Raises:
        ConfigError: something is missing, unexpected or of another shape; the message names it.
    """
    templates: dict[Path, Shape] = {}
    for shapes in wanted:
        templates.update({path: shape for path, shape in shapes.items() if not is_free(path)})
    kept = {path: shape for path, shape in saved.items() if not is_free(path)}
    slots = {_slots_of(path) for path in kept}
    missing = [p for p in templates if p not in kept and _slots_of(p) in slots | {None}]
    unexpected = [path for path in kept if path not in templates]
    other = [p for p in templates if p in kept and not _alike(kept[p], templates[p])]
    differences = [
        _listed("missing from it", map(dotted, missing)),
        _listed("only in it", map(dotted, unexpected)),
        _listed(
            "other shapes",
            (f"{dotted(p)} ({kept[p]} there, {templates[p]} here)" for p in other),
        ),
    ]
    if any(differences):
        raise ConfigError(
            f"the checkpoint {checkpoint} does not fit this run: "
            + ". ".join(filter(None, differences)),
            fix="resume with the model and optimizer that it was saved with, "
            "or start with checkpoint.resume=never",
            missing=[dotted(path) for path in missing],
            unexpected=[dotted(path) for path in unexpected],
            shapes=[dotted(path) for path in other],
        )


def join(
    state: Mapping[str, Any], saved: Mapping[str, Any], tensors: Mapping[Path, Tensor]
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
            if key in saved or _slots_of(path) is None:
                joined[key] = _join(value, saved.get(key, {}), path, kept)
        elif not isinstance(value, Tensor) and key not in saved and _slots_of(path) is None:
            joined[key] = value
            kept.append(dotted(path))
    return joined


def _slots_of(path: Path) -> Path | None:
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


def _listed(title: str, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{title}: " + ", ".join(names[:_SHOWN]) + more
