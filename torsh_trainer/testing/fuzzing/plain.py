"""What is right: a loop of plain PyTorch, on one process, over the same micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torsh_trainer.data.sampler import epoch_order
from torsh_trainer.testing.fuzzing.drawing import Combination
from torsh_trainer.testing.fuzzing.models import DrawnTask


@dataclass
class TrainingTrace:
    """What a run gave: by step, and at its end."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    slopes: dict[str, Tensor] = field(default_factory=dict)
    """The largest gradient of each element so far, of the parameters that have had one."""

    def is_rounding(self, name: str) -> Tensor | None:
        """Elements whose gradients were never more than rounding of the whole gradient, nor zero.

        An optimizer that divides by what it is given makes whole steps of them, which are noise.
        The bias of an attention's keys is of that kind.
        """
        if name not in self.slopes:
            return None
        least = torch.finfo(torch.float32).eps * max(self.norms.values())
        return (self.slopes[name] > 0) & (self.slopes[name] < least)


def batches(drawn: Combination, task: DrawnTask) -> Iterator[list[int]]:
    """Sample ids of each step, in the order that the documentation promises."""
    size, batch = drawn.samples, drawn.batch_size
    usable = size // batch * batch if drawn.drop_last else size
    for epoch in itertools.count():
        weights = task.data.sample_weights()
        order = epoch_order(size, seed=0, epoch=epoch, shuffle=drawn.shuffle, weights=weights)
        for begin in range(0, usable, batch):
            yield order[begin : min(begin + batch, usable)]


def train_plainly(drawn: Combination) -> TrainingTrace:
    """The combination's curve."""
    task = DrawnTask(drawn)
    model = task.build_model().train()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizers = task.build_optimizers(named)
    ema = None
    if drawn.ema is not None:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(drawn.ema))
    curve = TrainingTrace()
    for step, ids in enumerate(itertools.islice(batches(drawn, task), drawn.stops[-1]), 1):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        micros = [ids[i : i + drawn.micro_batch] for i in range(0, len(ids), drawn.micro_batch)]
        loaded = [tuple(t[torch.tensor(m)] for t in task.data.train.tensors) for m in micros]
        total = sum(task.weight(batch) for batch in loaded)
        summed = 0.0
        for batch in loaded:
            loss = task.loss(task.forward(model, batch), batch)
            share = task.weight(batch) / total
            (loss * share).backward()
            summed += float(loss.detach()) * share
        curve.losses[step] = summed
        for name, parameter in named:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                slope = parameter.grad.abs()
                curve.slopes[name] = slope.maximum(curve.slopes.get(name, slope))
        curve.norms[step] = clip(model, drawn)
        for optimizer in optimizers.values():
            optimizer.step()
        if ema is not None:
            ema.update_parameters(model)
    curve.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    curve.metrics = evaluate(task, model)
    if ema is not None:
        with torch.no_grad():
            for p, average in zip(model.parameters(), ema.module.parameters(), strict=True):
                p.copy_(average)
        curve.metrics = evaluate(task, model)
    return curve


def clip(model: torch.nn.Module, drawn: Combination) -> float:
    """The norm of all gradients before they are clipped, which this does."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    held = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = [gradient.values() if gradient.is_sparse else gradient for gradient in held]
    squares = [gradient.abs().double().square().sum() for gradient in gradients]
    norm = float(torch.stack(squares).sum().sqrt())
    with torch.no_grad():
        for gradient in gradients:
            if drawn.max_norm is not None:
                gradient.mul_(min(1.0, drawn.max_norm / (norm + 1e-6)))
            if drawn.max_value is not None:
                gradient.clamp_(-drawn.max_value, drawn.max_value)
    return norm


def evaluate(task: DrawnTask, model: torch.nn.Module) -> dict[str, float]:
    """The loss over the evaluation split, in micro-batches: an expert may depend on them."""
    model.eval()
    size = task.drawn.micro_batch
    with torch.no_grad():
        parts = zip(*(tensor.split(size) for tensor in task.data.eval.tensors), strict=True)
        sums = [
            (float(task.loss(task.forward(model, batch), batch)), task.weight(batch))
            for batch in parts
        ]
    return {"loss": sum(loss * weight for loss, weight in sums) / sum(w for _, w in sums)}
