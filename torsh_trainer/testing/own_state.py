"""Modules whose ``state_dict`` gives copies, or more than tensors; their own loading counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyModel, TinyModelOptions, TinyTask


class Extra(TinyModel):
    """``factor`` is no parameter, and travels as extra state."""

    def __init__(self, options: TinyModelOptions) -> None:
        super().__init__(options)
        self.factor = 1.0 + options.seed

    def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Logits."""
        return super().forward(tokens, *args, **kwargs) * self.factor

    def get_extra_state(self) -> Any:
        return {"factor": self.factor, "sum": torch.tensor([self.factor])}

    def set_extra_state(self, state: Any) -> None:
        self.factor = state["factor"]


class ExtraTensor(Extra):
    """Its extra state is a tensor."""

    def get_extra_state(self) -> Any:
        return torch.tensor(self.factor)

    def set_extra_state(self, state: Any) -> None:
        self.factor = float(state)


class Copying(Extra):
    """A hook copies what it gives; some of it does not train."""

    def __init__(self, options: TinyModelOptions) -> None:
        super().__init__(options)
        self.embedding.requires_grad_(False)
        self.register_state_dict_post_hook(_give_copies)


class Packed(TinyModel):
    """Saves its last norm as one tensor, and takes it apart again."""

    def __init__(self, options: TinyModelOptions) -> None:
        super().__init__(options)
        self.norm = PackedNorm(self.norm)  # type: ignore[assignment]


class PackedNorm(nn.Module):
    """A layer norm that travels as one tensor."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.bias = nn.Parameter(norm.bias.detach().clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normed, of the same shape."""
        shape = (hidden.shape[-1],)
        return nn.functional.layer_norm(hidden, shape, self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "both"] = torch.stack([self.weight.detach(), self.bias.detach()])

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[prefix + "both"][0])
            self.bias.copy_(state[prefix + "both"][1])


def _give_copies(module: nn.Module, state: Any, prefix: str, local: Any) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.clone()


KINDS = (Extra, ExtraTensor, Copying, Packed)
"""Every kind."""


class OwnTask(TinyTask):
    """The tiny task with a model of ``kind``."""

    kind: type[TinyModel] = Copying

    def build_model(self) -> TinyModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            return self.kind(self.options)


@dataclass(frozen=True)
class OwnScenario(Scenario):
    """A scenario of such a model."""

    kind: type[TinyModel] = Copying

    @property
    def task(self) -> TinyTask:
        """A new task."""
        task = OwnTask(self.model, self.optimizer)
        task.kind = self.kind
        return task
