"""Samples made into a batch by torch's default, with words for those that do not fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from torsh_trainer.errors import ConfigError

_NEXT = (
    "give the data source a collate(samples) that makes one batch of them, by padding say "
    "(torch.nn.utils.rnn.pad_sequence)"
)
_SHOWN = 4


def stacked(samples: list[Any]) -> Any:
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
