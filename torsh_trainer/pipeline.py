"""A model in stages over the processes of a group, as a module for plain scripts; see
docs/parallel.md.

A run of the trainer does not need it: ``strategy=parallel mesh.pp=2`` cuts a model as it is. The
orders and the messages are the same (``strategies.pipeline``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.distributed.process_group import Group, resolve
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import MicroBatch
from torsh_trainer.strategies.pipeline.crossing import Left
from torsh_trainer.strategies.pipeline.exchange import Exchange, TensorSpec
from torsh_trainer.strategies.pipeline.orders import (
    check_micro_batches,
    check_schedule,
    order_of,
)
from torsh_trainer.strategies.pipeline.step import Message, PipelineStep, StageForward

Loss = Callable[[Any, Any], Tensor]
"""The mean loss of outputs and targets."""


class PipelineParallel(nn.Module):
    """Stages of one model, of which each process of ``group`` has every ``size``-th.

    ``stages`` are modules, or lists of modules called one after the other; all processes give all
    of them, and keep their own. A call cuts its input into ``num_microbatches`` along the first
    dimension, runs them through the stages one behind the other, and gives all outputs, joined, on
    every process; each of them computes the same loss, and calls backward. ``run_step`` runs
    forwards and backwards in the order of ``schedule`` (``gpipe``, ``1f1b``; with several stages on
    a process ``interleaved_1f1b``, ``looped_bfs``), which holds fewer activations.
    ``device_placement`` is where each stage computes; None is the group's device. Without a process
    group all stages are this process's.

    Parameters are those of one process to the bit at the start, and so are gradients of the same
    micro-batches; dropout draws from each process's own generator.

    Raises:
        ConfigError: stages, devices or micro-batches do not fit each other, or a schedule.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | Iterable[nn.Module]],
        num_microbatches: int,
        device_placement: Sequence[torch.device | str] | None = None,
        *,
        schedule: str | None = None,
        group: Group = None,
    ) -> None:
        super().__init__()
        alone = group is None and not dist.is_initialized()
        self._comm: Communicator = (
            LocalCommunicator(torch.device("cpu")) if alone else resolve(group).communicator()
        )
        made = [one if isinstance(one, nn.Module) else nn.Sequential(*one) for one in stages]
        self.num_stages, self.num_microbatches = len(made), num_microbatches
        self._check(device_placement)
        each = self.num_stages // self._comm.size
        self.schedule = schedule or ("1f1b" if each == 1 else "interleaved_1f1b")
        if self._comm.size > 1:
            check_schedule(self.schedule, each)
            check_micro_batches(
                self.schedule, ranks=self._comm.size, micro_batches=num_microbatches
            )
        placed = device_placement or [self._comm.device] * self.num_stages
        self._devices = [torch.device(one) for one in placed]
        own = range(self._comm.rank, self.num_stages, self._comm.size)
        self.stages = nn.ModuleDict({str(i): made[i].to(self._devices[i]) for i in own})
        for one in made:  # what rank 0 has made
            self._share(one)
        self.exchanges = [Exchange(self._comm), Exchange(self._comm)]
        """By whether gradients are computed: the shapes that both sides know of are others."""

    def _check(self, devices: Sequence[Any] | None) -> None:
        if not self.num_stages or self.num_stages % self._comm.size:
            raise ConfigError(
                f"{self.num_stages} stages do not divide over {self._comm.size} processes",
                fix=f"give a multiple of {self._comm.size}, or a smaller group",
            )
        if devices is not None and len(devices) != self.num_stages:
            raise ConfigError(
                f"device_placement names {len(devices)} devices for {self.num_stages} stages",
                fix="name one for each stage, in their order",
            )
        if self.num_microbatches < 1:
            raise ConfigError(
                f"num_microbatches={self.num_microbatches} is below 1", fix="give 1 or more"
            )

    @torch.no_grad()
    def _share(self, stage: nn.Module) -> None:
        """Rank 0's values, on the process that keeps ``stage``; the others let theirs go."""
        for tensor in (*stage.parameters(), *stage.buffers()):
            sent = self._comm.to_device(tensor.detach()).contiguous()
            self._comm.broadcast(sent)
            tensor.copy_(sent)

    def rank_of(self, stage: int) -> int:
        """The process of the group that has ``stage``."""
        return stage % self._comm.size

    # -- calls ------------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """(samples, ...), the same on every process, -> (samples, ...) of the last stage, on each.

        Collective, as the backward of what it gives is.

        Raises:
            ConfigError: there are fewer samples than micro-batches.
        """
        parts = self._split(input)
        if self._comm.size == 1:
            return torch.cat([self._run_alone(part) for part in parts])
        run = _Run(self, parts)
        output = run.forward()
        if not torch.is_grad_enabled():
            return output
        anchor = torch.ones((), requires_grad=True, device=output.device)
        joined: Tensor = _JoinedOutput.apply(anchor, input, output, run)
        return joined

    def run_step(self, input: Tensor, target: Tensor, loss: Loss) -> Tensor:
        """Adds the gradients of the mean of ``loss(outputs, targets)`` over all samples, and gives
        it, 0-dim, on every process; collective.

        ``input`` and ``target`` have samples in front, the same on every process.
        """
        parts, targets = self._split(input), self._split(target)
        weights = [len(part) / len(input) for part in parts]
        if self._comm.size == 1:
            total = torch.zeros((), device=self._devices[-1])
            for part, wanted, weight in zip(parts, targets, weights, strict=True):
                one = loss(self._run_alone(part), wanted.to(self._devices[-1])) * weight
                one.backward()
                total += one.detach()
            return total
        return _Run(self, parts, targets, weights, loss).step()

    def _split(self, whole: Tensor) -> list[Tensor]:
        if len(whole) < self.num_microbatches:
            raise ConfigError(
                f"{len(whole)} samples do not make {self.num_microbatches} micro-batches",
                fix=f"give more samples, or num_microbatches={len(whole)}",
            )
        return list(whole.tensor_split(self.num_microbatches))

    def _run_alone(self, part: Tensor) -> Tensor:
        for number, stage in enumerate(self.stages.values()):
            part = stage(part.to(self._devices[number]))
        return part

    def order(self, schedule: str) -> Sequence[Any]:
        """This process's actions."""
        return order_of(
            schedule,
            ranks=self._comm.size,
            stages_per_rank=self.num_stages // self._comm.size,
            micro_batches=self.num_microbatches,
            rank=self._comm.rank,
        )

    def share_last(self, tensor: Tensor | None) -> Tensor:
        """What the process of the last stage has, on every process."""
        src = self.rank_of(self.num_stages - 1)
        told = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        shape, dtype = self._comm.broadcast_object(told, src=src)
        sent = (
            torch.empty(shape, dtype=dtype, device=self._comm.device)
            if tensor is None
            else self._comm.to_device(tensor.detach()).clone()
        )
        self._comm.broadcast(sent, src=src)
        return sent

    def share_first(self, tensor: Tensor) -> Tensor:
        """What the process of the first stage has, on every process."""
        sent = self._comm.to_device(tensor)
        self._comm.broadcast(sent, src=0)
        return sent

    def run_stage(self, stage: int, input: Tensor) -> Tensor:
        """What ``stage``, one of this process's, makes of ``input``."""
        output: Tensor = self.stages[str(stage)](input.to(self._devices[stage]))
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"stage {stage} gives a {type(output).__name__}, and one tensor is what goes on",
                fix="let each stage take a tensor and give one",
            )
        return output


class _Run:
    """Micro-batches on their way: what ``PipelineStep`` asks of an engine, on plain modules."""

    def __init__(
        self,
        pipeline: PipelineParallel,
        parts: Sequence[Tensor],
        targets: Sequence[Tensor] = (),
        weights: Sequence[float] = (),
        loss: Loss | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._last = pipeline.num_stages - 1
        self._parts = list(parts)
        self._targets, self._weights, self._loss = targets, weights, loss
        self._gradients: Sequence[Tensor] = ()  # of the outputs of each micro-batch
        micro_batches = [MicroBatch((part, i), 1.0, None) for i, part in enumerate(parts)]
        self.exchange = pipeline.exchanges[torch.is_grad_enabled()]
        self.rank_of = pipeline.rank_of
        self._step = PipelineStep(self, self, micro_batches)

    def forward(self) -> Tensor:
        """All outputs, joined, on every process."""
        self._step.run([a for a in self._order() if "forward" in a.kind])
        outputs = [self._step.losses[i] for i in sorted(self._step.losses)]
        return self._pipeline.share_last(torch.cat(outputs) if outputs else None)

    def backward(self, gradient: Tensor, input: Tensor) -> Tensor | None:
        """Adds gradients, and gives those of ``input``, where it has some."""
        self._gradients = gradient.tensor_split(len(self._parts))
        self._step.run([a for a in self._order() if "backward" in a.kind])
        if not input.requires_grad:
            return None
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parts]
        return self._pipeline.share_first(torch.cat(own))

    def step(self) -> Tensor:
        """Forwards and backwards in the order of the schedule; the mean loss."""
        self._step.run(self._pipeline.order(self._pipeline.schedule))
        losses = list(self._step.losses.values())
        return self._pipeline.share_last(torch.stack(losses).sum() if losses else None)

    def _order(self) -> Sequence[Any]:
        return self._pipeline.order("looped_bfs" if len(self._pipeline.stages) > 1 else "gpipe")

    def run_forward(self, stage: int, micro: MicroBatch, message: Message | None) -> StageForward:
        """See ``StageWork``."""
        part, number = micro.batch
        received = None if message is None else message.received
        if received is None:
            self._parts[number] = part = part.detach().requires_grad_(part.requires_grad)
        else:
            (part,) = received.as_inputs()
        output = self._pipeline.run_stage(stage, part)
        state = torch.zeros(1, dtype=torch.uint8, device=output.device)
        if stage < self._last:
            spec = TensorSpec(0, tuple(output.shape), output.dtype, output.requires_grad)
            return StageForward(Left([spec], [output]), received, state, None)
        if self._loss is not None:
            wanted = self._targets[number].to(output.device)
            output = self._loss(output, wanted) * self._weights[number]
        return StageForward(output, received, state, number)

    def run_backward(
        self, micro: MicroBatch, done: StageForward, gradients: Sequence[Tensor] | None
    ) -> None:
        """See ``StageWork``."""
        if isinstance(done.result, Left):
            outputs = [
                t for s, t in zip(done.result.specs, done.result.tensors, strict=True) if s.trains
            ]
            torch.autograd.backward(outputs, gradients)
        elif self._loss is not None:
            done.result.backward()
        elif done.result.requires_grad:
            done.result.backward(self._gradients[done.draws].to(done.result.device))


class _JoinedOutput(torch.autograd.Function):
    """The outputs of a run, whose backward is the run's."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, input: Tensor, output: Tensor, run: _Run) -> Tensor:
        ctx.run, ctx.input = run, input
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        return None, ctx.run.backward(gradient, ctx.input), None, None
