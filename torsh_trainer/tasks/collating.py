"""Samples made into a batch, with words for those that do not fit together, or are left out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import Task

log = logging.getLogger(__name__)

_NEXT = (
    "give the data source a collate(samples) that makes one batch of them, by padding say "
    "(torch.nn.utils.rnn.pad_sequence)"
)
_SHOWN = 4


def stack(samples: list[Any]) -> Any:
    """``default_collate`` of ``samples``.

    Raises:
        ConfigError: they differ in shape, length, keys or type, or torch makes no batch of such.
    """
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        raise _misfit(samples, error) from error


def _misfit(samples: Sequence[Any], error: Exception) -> ConfigError:
    found: dict[str, dict[str, None]] = {}
    for sample in samples:
        for place, form in _forms(sample, "sample").items():
            found.setdefault(place, {})[form] = None
    for place, forms in found.items():
        if len(forms) > 1:
            shown = " and ".join(list(forms)[:_SHOWN])
            more = f" and {len(forms) - _SHOWN} others" if len(forms) > _SHOWN else ""
            return ConfigError(
                f"the {len(samples)} samples of a batch cannot be stacked: {place} has "
                f"{shown}{more}",
                fix=_NEXT,
                place=place,
            )
    why = next(iter(str(error).splitlines()), type(error).__name__)
    return ConfigError(f"torch makes no batch of these samples: {why}", fix=_NEXT)


def _forms(value: Any, place: str) -> dict[str, str]:
    """Place in a sample, as Python would write it -> what has to be the same in all samples."""
    if hasattr(value, "shape"):
        return {place: f"shape {tuple(value.shape)}"}
    if isinstance(value, Mapping):
        parts = [(f"{place}[{key!r}]", part) for key, part in value.items()]
        own = "the keys " + ", ".join(sorted(map(str, value)))
    elif isinstance(value, list | tuple):
        parts = [(f"{place}[{i}]", part) for i, part in enumerate(value)]
        own = f"{len(value)} items"
    else:
        return {place: f"type {type(value).__name__}"}
    found = {place: own}
    for at, part in parts:
        found |= _forms(part, at)
    return found


class LeftOut:
    """Notices a collate of the task's own that leaves samples out, as one that drops bad ones.

    The loss of a batch is then a mean over fewer samples than it counts as, and depends on how a
    global batch is cut. Said once.
    """

    def __init__(self, task: Task) -> None:
        counts = task.sample_weight is None and type(task).weight is not Task.weight
        self.looks = not counts and task.data.collate is not None

    def look(self, batch: Any, drawn: int) -> None:
        """``batch`` was made of ``drawn`` samples."""
        if not self.looks or _rows_of_first(batch) == drawn:
            return
        shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        rows = {shape[0] for shape in shapes if shape}
        if len(rows) != 1 or any(drawn in shape for shape in shapes) or max(rows) > drawn:
            return  # no rows of samples, or all of them in another dimension
        self.looks = False
        log.warning(
            f"collate gave {max(rows)} rows for {drawn} samples, and their mean counts as that "
            f"of {drawn}: the number of processes shows in the result. Leave samples out of the "
            "dataset instead, or set sample_weight = None in the task, and let weight(batch) count "
            "what the loss is a mean over"
        )


def _rows_of_first(batch: Any) -> int | None:
    """The rows of the first tensor of a flat batch: all that most batches are asked, each step."""
    if isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    elif isinstance(batch, dict) and batch:
        batch = next(iter(batch.values()))
    return batch.shape[0] if isinstance(batch, Tensor) and batch.dim() else None
