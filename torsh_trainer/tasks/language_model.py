"""Next-token prediction."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource, Mean, Task
from torsh_trainer.tasks.chunked_loss import IGNORED as IGNORED
from torsh_trainer.tasks.chunked_loss import chunk_rows, pays
from torsh_trainer.tasks.fit import check_fit


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

    ``chunked_loss`` true never makes the logits of a whole batch: the model's forward gets
    ``targets`` (batch, T) and gives the sum of their losses, as ``GPT`` does and any model whose
    class says ``sums_losses = True``. auto does so from half a GiB of logits on; false never.

    Raises:
        ConfigError: ``chunked_loss`` is none of the three, or true for a model that cannot.
    """

    unit = "tokens"

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: DataSource,
        optimizer: OptimizerSpec = OptimizerSpec(),
        *,
        chunked_loss: bool | Literal["auto"] = "auto",
    ) -> None:
        if chunked_loss not in (True, False, "auto"):
            raise ConfigError(
                f"task.chunked_loss={chunked_loss} is unknown", fix="choose auto, true or false"
            )
        self.chunked_loss = chunked_loss
        self._words: int | None = None  # of a model that sums losses
        self._padded: dict[str, int] = {}  # rows that stand for words, by the parameter's name
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
        return self._ask_model(check_fit(self.model(), self.data))

    def _ask_model(self, model: nn.Module) -> nn.Module:
        """``model``, after it was asked whether it sums losses."""
        self._padded = dict(getattr(model, "padded_rows", {}))
        sums = getattr(model, "sums_losses", False) and "targets" in parameters_of(model.forward)
        self._words = words_of(model) if sums and self.chunked_loss else None
        if self._words is None and self.chunked_loss is True:
            raise ConfigError(
                f"task.chunked_loss=true, and a {type(model).__name__} does not sum losses",
                fix="leave it at auto, or let its forward take targets: see LanguageModel",
            )
        return model

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if self._words is not None and self._sums(_size(batch)):
            return self._call(model, batch, targets=_targets(batch))
        return self._call(model, batch)

    def _call(self, model: nn.Module, batch: Any, **more: Tensor) -> Tensor:
        return model(_inputs(batch), **more)

    def _sums(self, tokens: int) -> bool:
        """Whether the model gives the sum of the losses of so many tokens."""
        if self._words is None:
            return False
        return self.chunked_loss is True or pays(tokens, self._words)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        targets = _targets(batch)
        if outputs.dim() == 0:
            return outputs / _count_targets(targets, batch)
        logits = outputs.float().flatten(0, 1)
        if isinstance(batch, Tensor):
            return F.cross_entropy(logits, targets.flatten())
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / _count_targets(targets, batch)

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
        logits = self._call(model, batch).float()
        losses = F.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
        )
        return losses.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)

    def state_dict(self) -> dict[str, Any]:
        """Which rows of the weights stand for a word, for whoever exports them."""
        return {"export": {"rows": self._padded}} if self._padded else {}

    load_state_dict = Task.load_state_dict  # nothing to take back: a run makes it anew

    def notes(self, *, micro_batch_size: int) -> Mapping[str, str]:
        notes = {}
        for name, words in self._padded.items():
            notes["vocabulary"] = f"{words:,} words, and rows of 0 in {name} that stand for none"
        tokens = int(micro_batch_size * self.units_per_sample)
        if self._words is not None and self._sums(tokens):
            rows = chunk_rows(self._words)
            notes["loss"] = f"in chunks of {rows:,} tokens (task.chunked_loss)"
        return notes

    def flops_per_sample(self, model: nn.Module) -> float | None:
        """``units_per_sample`` times ``flops_per_token``, where that is known.

        None too where parameters are frozen: the formulas would count gradients that nobody
        computes.
        """
        tokens = self.units_per_sample
        frozen = any(not p.requires_grad for p in model.parameters())
        count = None if frozen else self.flops_per_token(model, tokens)
        return None if count is None else tokens * count

    def flops_per_token(self, model: nn.Module, tokens: float) -> float | None:
        """Operations of forward and backward for a token of a sequence of ``tokens``.

        The model's own ``flops_per_token(tokens)``, if it has one.
        """
        count = getattr(model, "flops_per_token", None)
        return None if count is None else count(tokens)


def parameters_of(forward: Callable[..., Any]) -> Collection[str]:
    """The names of what ``forward`` takes."""
    return inspect.signature(forward).parameters


def words_of(model: nn.Module) -> int | None:
    """The size of the model's vocabulary, where it says one."""
    words = getattr(model, "vocab_size", None)
    return words if isinstance(words, int) else None


def _count_targets(targets: Tensor, batch: Any) -> Tensor | int:
    """How many targets count; at least 1, so that the loss of none is 0 and not NaN."""
    if isinstance(batch, Tensor):
        return targets.numel()
    return (targets != IGNORED).sum().clamp(min=1)


def _size(batch: Any) -> int:
    """How many targets a batch has, those that do not count included."""
    part = batch[:, 1:] if isinstance(batch, Tensor) else batch.get("targets", batch)
    return part.numel() if isinstance(part, Tensor) else 0


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
