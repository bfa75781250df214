"""Next-token prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.optimizers import OptimizerSpec
from torsh_trainer.task import DataSource, Mean, Task
from torsh_trainer.tasks.fit import fitted

IGNORED = -100
"""A target that does not count: padding, or text that is given and not to be learned."""


class LanguageModel(Task):
    """Cross entropy of the next token, as a mean over tokens.

    A batch is a tensor of token numbers (batch, T + 1), whose every token but the first is a
    target; or a dict with ``tokens`` and ``targets`` (batch, T each; ``targets[b, t]`` follows
    ``tokens[b, t]``), where a target of -100 does not count. The model maps (batch, T) to logits
    (batch, T, vocabulary).

    Where the data says ``fixed_length=True`` and its ``context``, every sample weighs ``context``
    tokens, and the weight of a global batch needs no communication; else the targets of each
    batch are counted. Evaluation gives ``loss`` (nats a token), ``perplexity`` = exp(loss), and
    for data that says ``byte_level=True`` also ``bits_per_byte`` = loss / ln 2. Prediction gives
    the mean loss of every sample, (batch,).
    """

    unit = "tokens"

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: DataSource,
        optimizer: OptimizerSpec = OptimizerSpec(),
    ) -> None:
        self.model = model
        self.data = data
        self.optimizer = optimizer
        fixed = getattr(data, "fixed_length", False)
        self.sample_weight = float(data.context) if fixed else None  # type: ignore[attr-defined]

    @property
    def units_per_sample(self) -> float:  # type: ignore[override]
        """Tokens of a sample: the context, or the mean over the training samples."""
        if self.sample_weight is not None:
            return self.sample_weight
        return float(getattr(self.data, "mean_length", 1.0))

    def build_model(self) -> nn.Module:
        return fitted(self.model(), self.data)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(_inputs(batch))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        targets = _targets(batch)
        logits = outputs.float().flatten(0, 1)
        if isinstance(batch, Tensor):
            return F.cross_entropy(logits, targets.flatten())
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / (targets != IGNORED).sum().clamp(min=1)  # 0, not NaN, where nothing counts

    def weight(self, batch: Any) -> float:
        targets = _targets(batch)
        if isinstance(batch, Tensor):
            return float(targets.numel())
        return float((targets != IGNORED).sum())

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Mean]:
        loss = self.loss(self.forward(model, batch), batch)
        targets = _targets(batch)
        weight: Tensor | int = targets.numel()
        if not isinstance(batch, Tensor):
            weight = (targets != IGNORED).sum()  # stays on the device
        return {"loss": Mean(loss * weight, weight)}

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        loss = metrics["loss"]
        summary = {**metrics, "perplexity": math.exp(loss) if loss < 700 else math.inf}
        if getattr(self.data, "byte_level", False):
            summary["bits_per_byte"] = loss / math.log(2)
        return summary

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        targets = _targets(batch)
        logits = self.forward(model, batch).float()
        losses = F.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
        )
        return losses.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)

    def flops_per_sample(self, model: nn.Module) -> float | None:
        """``units_per_sample`` times the model's own ``flops_per_token(tokens)``, if it has one."""
        count = getattr(model, "flops_per_token", None)
        tokens = self.units_per_sample
        return None if count is None else tokens * count(tokens)


def _inputs(batch: Any) -> Tensor:
    return batch[:, :-1].long() if isinstance(batch, Tensor) else _part(batch, "tokens")


def _targets(batch: Any) -> Tensor:
    return batch[:, 1:].long() if isinstance(batch, Tensor) else _part(batch, "targets")


def _part(batch: Any, name: str) -> Tensor:
    if not isinstance(batch, Mapping) or not isinstance(batch.get(name), torch.Tensor):
        raise ConfigError(
            f"a batch of type {type(batch).__name__} has no tensor called {name!r}",
            fix="let the collate return a tensor (batch, T + 1), or a dict of tokens and targets",
        )
    return batch[name].long()
