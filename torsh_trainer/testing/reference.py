"""Plain PyTorch on one process, written out: what every engine is held against.

Nothing here comes from an engine: one loop over the whole global batch, torch's own clipping and
loss scaler, and the gradient of a step is the sum over micro-batches of ``weight / total`` times
the gradient of the micro-batch's mean loss.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Clip, MicroBatch
from torsh_trainer.testing.tiny import TinyData, TinyModelOptions, TinyTask, total_weight

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Scenario:
    """What is trained, on what, and how; engine and reference both read it.

    ``schedule`` are factors on every learning rate, one a step; empty leaves them alone.
    """

    model: TinyModelOptions = TinyModelOptions()
    optimizer: Any = "sgd"
    data: TinyData = TinyData()
    precision: Precision = Precision()
    clip: Clip = Clip()
    schedule: tuple[float, ...] = ()
    activation_checkpointing: bool = False
    ema_decay: float | None = None
    skip_nonfinite: bool = False
    sync_batchnorm: bool = False

    @property
    def task(self) -> TinyTask:
        """A fresh task."""
        return TinyTask(self.model, self.optimizer)


@dataclass
class TrainingOutcome:
    """What training left: all that an engine and plain PyTorch are compared by.

    ``losses`` are by step, rank and micro-batch; None where the weight is 0. ``optimizer`` is
    ``{optimizer: {parameter: {slot: tensor}}}``. ``metrics`` are means over the evaluation data,
    ``averaged_metrics`` the same under the moving average; ``loss_scale`` is None without one.
    """

    losses: list[list[list[float | None]]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    averaged_metrics: dict[str, float] = field(default_factory=dict)
    loss_scale: float | None = None


def train(
    scenario: Scenario,
    world_size: int,
    *,
    gradient_scale: float = 1.0,
    device: str = "cpu",
    task: TinyTask | None = None,
) -> TrainingOutcome:
    """Trains the scenario's global batches for ``world_size`` ranks in a plain loop.

    ``task`` is another one than the scenario's.
    """
    plain = _Plain(scenario, gradient_scale, torch.device(device), task or scenario.task)
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        factor = scenario.schedule[number] if scenario.schedule else 1.0
        plain.step(scenario.data.step(number, world_size), factor, outcome)
    outcome.parameters = {k: v.detach().cpu() for k, v in plain.model.state_dict().items()}
    outcome.optimizer = plain.optimizer_state()
    outcome.loss_scale = plain.scaler.get_scale() if plain.scaler.is_enabled() else None
    batches = [item for rank in scenario.data.evaluation(world_size) for item in rank]
    outcome.metrics = plain.evaluate(batches)
    if plain.averages is not None:
        with plain.swap_in_averages():
            outcome.averaged_metrics = plain.evaluate(batches)
    return outcome


class _Plain:
    """A model, its optimizers, and everything that a plain script would hold beside them."""

    def __init__(
        self, scenario: Scenario, gradient_scale: float, device: torch.device, task: TinyTask
    ) -> None:
        self.scenario = scenario
        self.device = device
        self.task = task
        self.model = self.task.build_model().to(device)
        trainable = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.optimizers = self.task.build_optimizers(trainable)
        self.base_lrs = [[g["lr"] for g in o.param_groups] for o in self.optimizers.values()]
        self.gradient_scale = gradient_scale
        scaling = scenario.precision.loss_scaling
        self.scaler = torch.amp.GradScaler(
            device.type,
            enabled=scenario.precision.scales_loss,
            init_scale=scaling.initial_scale,
            growth_factor=scaling.growth_factor,
            backoff_factor=scaling.backoff_factor,
            growth_interval=scaling.growth_interval,
        )
        self.averages: dict[str, Tensor] | None = None
        self.updates = 0

    # -- one step -------------------------------------------------------------------------------

    def step(self, ranks: list[list[MicroBatch]], factor: float, outcome: TrainingOutcome) -> None:
        for optimizer, lrs in zip(self.optimizers.values(), self.base_lrs, strict=True):
            optimizer.zero_grad(set_to_none=True)
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * factor
        total = total_weight(ranks)
        if self.scenario.sync_batchnorm:
            columns = [self._together(column, total) for column in zip(*ranks, strict=True)]
            losses = [list(mine) for mine in zip(*columns, strict=True)]
        else:
            losses = [[self._traceless(micro, total) for micro in mine] for mine in ranks]
        norm, skipped = self._update()
        outcome.losses.append(losses)
        outcome.norms.append(norm)
        outcome.skipped.append(skipped)

    def _traceless(self, micro: MicroBatch, total: float) -> float | None:
        """A micro-batch, which leaves the buffers as they were if it is a filler."""
        kept = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        loss = self._micro_batch(micro, total)
        if micro.place is not None and micro.place.is_filler:
            for name, buffer in self.model.named_buffers():
                buffer.copy_(kept[name])
        return loss

    def _together(self, micros: Sequence[MicroBatch], total: float) -> list[float | None]:
        """One forward for what all ranks run at a time, without fillers; the loss of each."""
        real = [m for m in micros if m.place is None or not m.place.is_filler]
        if not real:
            return [None for _ in micros]
        batches = [self._to_device(micro.batch) for micro in real]
        tokens = torch.cat([batch["tokens"] for batch in batches])
        with self._autocast():
            outputs = self.model(tokens).split([len(batch["tokens"]) for batch in batches])
            losses = [self.task.loss(*pair) for pair in zip(outputs, batches, strict=True)]
        parts = [
            loss * (micro.weight / total)
            for loss, micro in zip(losses, real, strict=True)
            if micro.weight
        ]
        if parts:
            self.scaler.scale(torch.stack(parts).sum() * self.gradient_scale).backward()
        found = {
            id(m): float(one.detach()) for m, one in zip(real, losses, strict=True) if m.weight
        }
        return [found.get(id(micro)) for micro in micros]

    def _micro_batch(self, micro: MicroBatch, total: float) -> float | None:
        if micro.rng_key is not None:
            torch.manual_seed(micro.rng_key)
        batch = self._to_device(micro.batch)
        precision = self.scenario.precision
        low = None
        if precision.params == "bf16":
            # A bf16 copy runs forward and backward; its gradients reach the fp32 master.
            low = copy.deepcopy(self.model).to(torch.bfloat16)
            low.zero_grad(set_to_none=True)
            loss = self.task.loss(low(batch["tokens"]).float(), batch)
        else:
            with self._autocast():
                loss = self.task.loss(self.task.forward(self.model, batch), batch)
        if micro.weight == 0:
            return None
        scaled = self.scaler.scale(loss * (micro.weight / total) * self.gradient_scale)
        scaled.backward()
        if low is not None:
            _add_gradients(low, self.model)
        return float(loss.detach())

    def _update(self) -> tuple[float, bool]:
        """Unscales, clips and steps as torch's documentation says; (norm before clipping, skip)."""
        for optimizer in self.optimizers.values():
            self.scaler.unscale_(optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        careful = self.scenario.skip_nonfinite or self.scaler.is_enabled()
        skipped = careful and not bool(torch.isfinite(norm))
        clip = self.scenario.clip
        if clip.norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip.norm)
        if clip.value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), clip.value)
        if not skipped or self.scaler.is_enabled():  # torch's scaler leaves the step out by itself
            for optimizer in self.optimizers.values():
                self.scaler.step(optimizer)
        if not skipped:
            self._average()
        self.scaler.update()
        return float(norm), skipped

    def _average(self) -> None:
        decay = self.scenario.ema_decay
        if decay is None:
            return
        values = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        if self.averages is None:  # the random start has no part in the average
            self.averages = values
        else:
            self.averages = {
                name: decay * average + (1 - decay) * values[name]
                for name, average in self.averages.items()
            }

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        precision = self.scenario.precision
        if not precision.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=_LOW[precision.compute])

    def _to_device(self, batch: Any) -> Any:
        return tree_map(lambda leaf: leaf.to(self.device), batch)

    # -- after training -------------------------------------------------------------------------

    def evaluate(self, batches: list[tuple[Any, bool]]) -> dict[str, float]:
        """Means over the batches that count."""
        sums: dict[str, list[float]] = {}
        model = self.model
        if self.scenario.precision.params == "bf16":
            model = copy.deepcopy(model).to(torch.bfloat16)
        model.eval()
        for batch, counts in batches:
            with torch.no_grad(), self._autocast():
                metrics = self.task.evaluate(_Widened(model), self._to_device(batch))
            for name, mean in metrics.items():
                total, weight = sums.setdefault(name, [0.0, 0.0])
                if counts:
                    sums[name] = [total + float(mean.total), weight + float(mean.weight)]
        self.model.train()
        return {name: total / weight for name, (total, weight) in sums.items()}

    @contextlib.contextmanager
    def swap_in_averages(self) -> Iterator[None]:
        """Within, the model holds the moving average."""
        assert self.averages is not None
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        _set(self.model, self.averages)
        yield
        _set(self.model, kept)

    def optimizer_state(self) -> dict[str, dict[str, dict[str, Any]]]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {
            key: {names[id(p)]: _on_cpu(slots) for p, slots in optimizer.state.items() if slots}
            for key, optimizer in self.optimizers.items()
        }


class _Widened(nn.Module):
    """A model whose outputs come back in fp32 unless autocast says otherwise."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = self.model(*args, **kwargs)
        return logits if torch.is_autocast_enabled(logits.device.type) else logits.float()


def _on_cpu(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in slots.items()}


def _add_gradients(low: nn.Module, master: nn.Module) -> None:
    for copied, parameter in zip(low.parameters(), master.parameters(), strict=True):
        if copied.grad is not None:
            gradient = copied.grad.float()
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@torch.no_grad()
def _set(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
