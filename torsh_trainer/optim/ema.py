"""An exponential moving average of the parameters, for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.errors import ConfigError


class Ema:
    """``average = decay * average + (1 - decay) * value`` of every tensor, after each update.

    As in torch.optim.swa_utils.AveragedModel, the first update copies the values, so that the
    random start has no part in the average. ``warmup`` takes ``min(decay, (1 + t) / (10 + t))``
    at update t (Abadi et al., tf.train.ExponentialMovingAverage), for short runs with a high
    decay. Works on tensors and on DTensors; averages of bf16 and fp16 tensors are held in fp32,
    where steps of ``1 - decay`` do not vanish.

    Raises:
        ConfigError: ``decay`` is not between 0 and 1.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, decay: float, warmup: bool = False
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(
                f"trainer.ema_decay={decay} is not between 0 and 1",
                fix="the usual is 0.999, or null for no average",
            )
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self._names = list(parameters)
        self._values = [parameters[name] for name in self._names]
        self._averages = [_wide(value.detach()).clone() for value in self._values]
        # Averages and values of one dtype go to foreach as they are.
        self._narrow = any(
            a.dtype != v.dtype for a, v in zip(self._averages, self._values, strict=True)
        )
        self._swapped = False

    def add(self, parameters: Mapping[str, Tensor]) -> None:
        """Averages these too from here on; those that it has already go on as they are."""
        for name, value in parameters.items():
            if name not in self._names:
                self._names.append(name)
                self._values.append(value)
                self._averages.append(_wide(value.detach()).clone())
                self._narrow = self._narrow or self._averages[-1].dtype != value.dtype

    @torch.no_grad()
    def update(self) -> None:
        """Takes the parameters' values of this moment into the average."""
        assert not self._swapped, "an update within swapped() would average the average"
        values = [_wide(value) for value in self._values] if self._narrow else self._values
        if self.updates == 0:
            _copy(self._averages, values)
        else:
            decay = self.decay
            if self.warmup:
                decay = min(decay, (1 + self.updates) / (10 + self.updates))
            torch._foreach_lerp_(self._averages, values, 1.0 - decay)
        self.updates += 1

    @contextlib.contextmanager
    def swap_in(self) -> Iterator[None]:
        """Within, the parameters hold their averages; after, exactly what they held before.

        Needs one copy of the parameters while it lasts. Before the first update there is no
        average, and the parameters stay as they are.
        """
        assert not self._swapped, "swapped() is not to be nested"
        if self.updates == 0:
            yield
            return
        with torch.no_grad():
            kept = [value.detach().clone() for value in self._values]
            _copy(self._values, self._averages)
        self._swapped = True
        try:
            yield
        finally:
            with torch.no_grad():
                _copy(self._values, kept)
            self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        """``{"updates": int, "averages": {name: tensor}}``: the tensors themselves, no copies."""
        averages = dict(zip(self._names, self._averages, strict=True))
        return {"updates": self.updates, "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave.

        Raises:
            ConfigError: it is about other parameters.
        """
        averages = state["averages"]
        if set(averages) != set(self._names):
            odd = sorted(set(averages) ^ set(self._names))
            raise ConfigError(
                f"the checkpoint averages other parameters: {len(odd)} differ, {odd[0]} among them",
                fix="resume with the trainer.frozen and the model that were saved",
            )
        self.updates = int(state["updates"])
        with torch.no_grad():
            _copy(self._averages, [averages[name] for name in self._names])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    # Not torch._foreach_copy_: DTensors have no rule for it (torch 2.13).
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            target.copy_(source)
