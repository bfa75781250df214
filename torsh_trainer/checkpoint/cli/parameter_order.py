"""Which parameter an optimizer in a file means by a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.checkpoint.cli.imported import Import
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.utils.files import check_plain
from torsh_trainer.utils.lookup import list_first

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def count_parameters(state: Mapping[str, Any]) -> int:
    """How many parameters a state_dict of an optimizer is about."""
    return sum(len(group["params"]) for group in state["param_groups"])


class ParameterOrder:
    """Names for the parameters that optimizers know by number, one optimizer after another.

    Names come from ``--parameters``, from the file (``param_names``, or names for numbers), or,
    where one group holds every parameter, from the order of the weights: a state_dict has the
    parameters in the order of ``model.parameters()``, with buffers between them.
    """

    def __init__(self, weights: Mapping[str, Tensor], wanted: Import, *, total: int) -> None:
        self._weights = weights
        self._wanted = wanted
        self._total = total
        self._given = read_names(wanted.parameters, total, weights)
        self._used = 0

    def name_parameters(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``{"state": {name: slots}, "groups": [{..., "params": names}]}``.

        Raises:
            ConfigError: nothing says which number is which parameter.
        """
        keys = [key for group in state["param_groups"] for key in group["params"]]
        names = self._names(state, keys)
        unknown = [name for name in names if name not in self._weights]
        if unknown:
            raise ConfigError(
                f"the optimizer in {self._wanted.file} trains what is no weight in it: "
                + list_first(unknown),
                fix=nearest(unknown[0], self._weights),
            )
        name_of = dict(zip(keys, names, strict=True))
        groups = [
            {
                **{k: v for k, v in group.items() if k not in ("params", "param_names")},
                "params": [name_of[key] for key in group["params"]],
            }
            for group in state["param_groups"]
        ]
        slots = {name_of[k]: _slots(v) for k, v in state["state"].items() if k in name_of}
        return {"state": slots, "groups": groups}

    def _names(self, state: Mapping[str, Any], keys: Sequence[Any]) -> list[str]:
        strip = self._wanted.strip
        if self._given is not None:
            self._used += len(keys)
            return self._given[self._used - len(keys) : self._used]
        if all(isinstance(key, str) for key in keys):
            return [key.removeprefix(strip) for key in keys]
        groups = state["param_groups"]
        if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
            return [str(n).removeprefix(strip) for group in groups for n in group["param_names"]]
        return self._by_order(state, keys)

    def _by_order(self, state: Mapping[str, Any], keys: Sequence[Any]) -> list[str]:
        names = _trainable(self._weights)
        if len(state["param_groups"]) > 1 or self._total != len(keys):
            raise self._unknown("and has several groups, in an order of their own")
        if len(names) != len(keys):
            raise self._unknown(f"{len(keys)} of them, and {len(names)} weights could be meant")
        for key, name in zip(keys, names, strict=True):
            for slot in state["state"].get(key, {}).values():
                ours = self._weights[name].shape
                if isinstance(slot, Tensor) and slot.numel() > 1 and slot.shape != ours:
                    raise self._unknown(
                        f"and the state of number {key} has shape {list(slot.shape)}, "
                        f"while {name} has {list(ours)}"
                    )
        return names

    def _unknown(self, why: str) -> ConfigError:
        return ConfigError(
            f"the optimizer in {self._wanted.file} knows its parameters by number, {why}",
            fix="name them in that order, one a line, with --parameters FILE",
        )


def read_names(path: Path | None, total: int, weights: Mapping[str, Tensor]) -> list[str] | None:
    """The names in the file of ``--parameters``, ``total`` of them; None without one.

    Raises:
        ConfigError: it cannot be read, or does not name each of ``weights`` once.
    """
    if path is None:
        return None
    check_plain(path)
    try:
        names = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--parameters {path}: {why}", fix="correct the path") from error
    if len(names) != total or len(set(names)) != total:
        raise ConfigError(
            f"--parameters {path} has {len(set(names))} names for {total} parameters",
            fix="write each once: for g in optimizer.param_groups for p in g['params']",
        )
    unknown = next((name for name in names if name not in weights), None)
    if unknown is not None:
        raise ConfigError(
            f"--parameters {path}: there is no weight {unknown}", fix=nearest(unknown, weights)
        )
    return names


def _trainable(weights: Mapping[str, Tensor]) -> list[str]:
    """The weights that are parameters, as far as names and types tell; of tied ones the first."""
    names = []
    places: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in weights.items():
        place = tensor.data_ptr(), tuple(tensor.shape)
        tied = tensor.numel() > 0 and place in places
        places.add(place)
        if tensor.is_floating_point() and not tied and name.split(".")[-1] not in _BUFFERS:
            names.append(name)
    return names


def _slots(slots: Mapping[str, Any]) -> dict[str, Any]:
    """As torch's optimizers hold them today: ``step`` is a tensor."""
    step = slots.get("step")
    if isinstance(step, int | float):
        return {**slots, "step": torch.tensor(float(step), dtype=torch.float32)}
    return dict(slots)
