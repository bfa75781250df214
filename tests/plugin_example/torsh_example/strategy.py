"""Data parallel by hand: every process holds the model, gradients are summed after backward.

It is written against the contracts alone (``torsh_trainer.strategies.base``), with the helper that
keeps optimizer state by parameter name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from torsh_trainer.comm.base import Communicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.randomness import draws_of
from torsh_trainer.strategies.base import (
    Clip,
    Engine,
    Job,
    LossReport,
    Mesh,
    MicroBatch,
    StepOutcome,
    Strategy,
)
from torsh_trainer.strategies.buffers import Buffers
from torsh_trainer.strategies.state import (
    load_model,
    load_optimizers,
    materialise_slots,
    optimizer_state,
)
from torsh_trainer.tasks.base import Mean, Task


@dataclass(frozen=True)
class Example(Strategy):
    """Gradients averaged by hand. ``flatten`` sends all of them in one message."""

    name: ClassVar[str] = "example"
    model_axes: ClassVar[frozenset[str]] = frozenset({"model_replicate", "twin"})

    flatten: bool = True

    def needs_process_group(self, world: World) -> bool:
        return world.is_distributed

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world)

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        """The engine.

        Raises:
            Unsupported: ``job`` asks for something that this example leaves out.
        """
        for option, wanted in (
            (f"precision={job.precision.name}", job.precision.name != "fp32"),
            (f"precision.reduce={job.precision.reduce}", job.precision.reduce != "fp32"),
            (f"compression={job.compression.name}", job.compression.name != "none"),
            ("trainer.activation_checkpointing", job.activation_checkpointing),
            ("trainer.ema_decay", job.ema_decay is not None),
            ("trainer.on_nonfinite=skip", job.skip_nonfinite),
            ("trainer.sync_batchnorm", job.sync_batchnorm),
            ("trainer.compile", job.compile is not None),
        ):
            if wanted:
                raise self.refuse(option, use="use strategy=ddp")
        return ExampleEngine(self, job, comm)


class ExampleEngine(Engine):
    """The engine of ``example``."""

    def __init__(self, knobs: Example, job: Job, comm: Communicator) -> None:
        self.model = job.build_model().to(comm.device).train()
        self.optimizers = job.build_optimizers(self.model.named_parameters())
        self._knobs = knobs
        self._comm = comm
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._names = {id(p): name for name, p in self.model.named_parameters()}
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            comm.broadcast(tensor.detach(), src=0)
        self.randomness = job.randomness
        self._draws = draws_of(job.randomness, self.model, comm.device)
        self._buffers = Buffers(self.model, comm, averages=job.task.running_averages(self.model))

    # -- one step -------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        parts = []
        self._buffers.begin_step(micro_batches[0].place)
        for micro in micro_batches:
            batch, weight = micro.batch, micro.weight
            before = self._buffers.before(micro)
            with self._draws.of(micro):  # the backward too, which may run a forward again
                loss = task.loss(task.forward(self.model, batch), batch)
                _check(loss)
                # A loss over nothing may be 0/0, and NaN * 0 is NaN.
                counted = loss if weight else torch.nan_to_num(loss)
                (counted * (weight / total_weight)).backward()
            self._buffers.after(micro, before)
            parts.append((loss.detach(), weight))
        self._buffers.end_step()
        self._sum_gradients()
        return LossReport(tuple(parts))

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        norm = self._clip(self._parameters, clip, measure_norm=measure_norm)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return StepOutcome(norm, skipped=False)

    def _clip(
        self, parameters: Iterable[nn.Parameter], clip: Clip, *, measure_norm: bool
    ) -> Tensor | None:
        having = [p for p in parameters if p.grad is not None]
        norm = None
        if measure_norm or clip.norm is not None:
            bound = float("inf") if clip.norm is None else clip.norm
            norm = torch.nn.utils.clip_grad_norm_(having, bound)
        if clip.value is not None:
            torch.nn.utils.clip_grad_value_(having, clip.value)
        return norm

    def _sum_gradients(self) -> None:
        """Every rank's gradients, added; a parameter that no rank used keeps none."""
        flags = torch.tensor([float(p.grad is not None) for p in self._parameters])
        used = self._comm.to_device(flags)
        self._comm.all_reduce(used, op="max")
        gradients = []
        for parameter, is_used in zip(self._parameters, used.tolist(), strict=True):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        if not self._knobs.flatten:
            for gradient in gradients:
                self._comm.all_reduce(gradient)
        elif gradients:
            flat = _flatten_dense_tensors(gradients)
            self._comm.all_reduce(flat)
            parts = _unflatten_dense_tensors(flat, gradients)
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part)

    # -- manual optimization --------------------------------------------------------------------

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        _check(loss)
        run(loss)
        if sync:
            self._sum_gradients()
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self._comm.world.size)

    def step_one(
        self, name: str, clip: Clip = Clip(), *, measure_norm: bool = False
    ) -> StepOutcome:
        optimizer = self.optimizers[name]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = self._clip(parameters, clip, measure_norm=measure_norm)
        optimizer.step()
        return StepOutcome(norm, skipped=False)

    # -- evaluation -----------------------------------------------------------------------------

    def evaluate(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool = False
    ) -> dict[str, Mean]:
        sums: dict[str, Mean] = {}
        for batch, counts in self._in_evaluation(batches):
            for name, mean in task.evaluate(self.model, batch).items():
                if counts:
                    so_far = sums.get(name, Mean(0.0, 0.0))
                    sums[name] = Mean(so_far.total + mean.total, so_far.weight + mean.weight)
        return sums

    def predict(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool = False
    ) -> Iterator[Any]:
        for batch, counts in self._in_evaluation(batches):
            outputs = task.predict(self.model, batch)
            if counts:
                yield outputs

    def _in_evaluation(self, batches: Iterable[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
        self._buffers.gather()
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield from batches
        finally:
            self.model.train(training)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._buffers.gather()
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": {
                name: optimizer_state(optimizer, self._names)
                for name, optimizer in self.optimizers.items()
            },
        }

    def state_template(self) -> dict[str, Any]:
        for optimizer in self.optimizers.values():
            materialise_slots(optimizer)
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_model(self.model, state["model"])
        load_optimizers(self.optimizers, state["optimizer"], self._names)
        self._buffers.load({})

    def close(self) -> None:
        self.zero_grad()


def _check(loss: Tensor) -> None:
    if loss.dim() != 0 or not loss.requires_grad:
        raise ConfigError(
            "task.loss returned no scalar with a gradient", fix="return the mean over the batch"
        )
