"""What the native engines share: micro-batches and steps, built from the parts beside this file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.wire import Traffic
from torsh_trainer.emulation import NONE, Emulation, combine
from torsh_trainer.errors import Unsupported
from torsh_trainer.optim.ema import Ema
from torsh_trainer.optim.loss_scaling import LossScaler
from torsh_trainer.optim.precision import DTYPES
from torsh_trainer.randomness import draws_of
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.backward import ScaledBackward
from torsh_trainer.strategies.base import (
    Clip,
    Engine,
    GradientCompression,
    Job,
    LossReport,
    MicroBatch,
    StepOutcome,
)
from torsh_trainer.strategies.buffers import Buffers
from torsh_trainer.strategies.clipping import ClippedApart, Clipping, HeldGradients
from torsh_trainer.strategies.engine_state import EngineState
from torsh_trainer.strategies.evaluation import Around, Evaluation, nothing_around
from torsh_trainer.strategies.loss_check import LossCheck
from torsh_trainer.strategies.state import local_optimizer
from torsh_trainer.strategies.trainability import Change, Trainable, agree
from torsh_trainer.strategies.writes import DUE_FORWARDS, Writes, copy_words
from torsh_trainer.tasks.base import Mean, Task, why_no_backward

_NOTHING = contextlib.nullcontext()


class NativeEngine(Engine):
    """One process's engine on plain torch; by itself it is the engine of ``single``.

    ``module`` is what ``task.forward`` calls while training (a wrapper around ``model``),
    ``eval_module`` what it calls in evaluation. ``averaging_ranks`` is by how many ranks the
    wrapper divides the summed gradient, so that the loss can be scaled to undo it. ``gradients`` is
    what this process holds of them. ``compression`` is told of every backward and step, and its
    state goes into a checkpoint. ``optimizers`` are the job's where they had to be built before the
    wrapper. With ``broadcast_buffers`` what a training forward changes is rank 0's in every step.
    ``emulation`` is the strategy's; the job has its own. ``autocasts`` False leaves autocast to the
    wrapper. ``around_evaluation`` is entered before every evaluation.
    """

    emulates: ClassVar[bool] = True
    """Steps are its own: it honours ``precision.gradients`` and the emulation of the job."""

    keeps_frozen = False
    """What trained and is frozen stays among those that take part, as one that no loss reaches."""

    def __init__(
        self,
        job: Job,
        comm: Communicator,
        *,
        model: nn.Module,
        module: nn.Module,
        eval_module: nn.Module,
        averaging_ranks: int = 1,
        gradient_scale: float = 1.0,
        gradients: HeldGradients | None = None,
        wrap_optimizer: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer,
        compression: GradientCompression | None = None,
        optimizers: Mapping[str, Optimizer] | None = None,
        broadcast_buffers: bool = True,
        emulation: Emulation = NONE,
        autocasts: bool = True,
        around_evaluation: Around = nothing_around,
    ) -> None:
        precision = job.precision
        self.model = model
        self.module = module
        self.eval_module = eval_module
        self.comm = comm
        self._device = comm.device
        self._ranks = averaging_ranks * gradient_scale
        self._manual = job.manual
        self._trainable = Trainable(model)
        self._names = {id(p): name for name, p in self._trainable.named.items()}
        self._gradients = gradients or HeldGradients(model, comm.device)
        self._scaler = LossScaler(precision.loss_scaling) if precision.scales_loss else None
        self._clipping = Clipping(self._gradients, self._scaler, skips_nonfinite=job.skip_nonfinite)
        self._clipping.check(job.clip)
        self._clipped = ClippedApart(self._clipping)
        built = optimizers or self._build_optimizers(job)
        for optimizer in built.values() if self._gradients.sparse else ():
            modules.step_sparse(optimizer, self._gradients.sparse)  # type: ignore[arg-type]
        self.optimizers = {name: wrap_optimizer(optimizer) for name, optimizer in built.items()}
        self._compression = compression
        self._run_backward = ScaledBackward(comm.device)
        self.randomness = modules.randomness_of(job)
        self._draws = draws_of(self.randomness, model, comm.device)
        self._drawing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._autocast = DTYPES[precision.compute] if autocasts and precision.autocast else None
        self._last: dict[str, float] = {}
        self._buffers = self._make_buffers(job, shares=broadcast_buffers)
        self._writes = self._watch_writes(job)
        self._loss_check = LossCheck()
        self._forwards, self._looks = 0, False
        self._buffers_due = True  # the next training forward begins a step
        self._buffers_differ = True  # between ranks, for all that an evaluation knows
        self._held = None if precision.gradients == "fp32" else DTYPES[precision.gradients]
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._ema = None if job.ema_decay is None else Ema(trainable, decay=job.ema_decay)
        self._evaluation_writes = self._watch_writes(job)
        self._evaluation = self._make_evaluation(around_evaluation)
        self._state = self._make_state()
        self._emulation = combine(job.emulation, emulation)
        self._check_emulation(job)
        with self._stepping():
            stepped = list(self.optimizers.values())
            self._emulation.begin(stepped, self._parameters, forget=_forget_state)

    def _build_optimizers(self, job: Job) -> Mapping[str, Optimizer]:
        return job.build_optimizers(self.model.named_parameters())

    def _make_buffers(self, job: Job, *, shares: bool) -> Buffers:
        averages = job.task.running_averages(self.model)
        return Buffers(self.model, self.comm, shares=shares, averages=averages)

    def _make_evaluation(self, around: Around) -> Evaluation:
        return Evaluation(**self._evaluation_parts(around))

    def _evaluation_parts(self, around: Around) -> dict[str, Any]:
        return {
            "model": self.model,
            "module": self.eval_module,
            "device": self._device,
            "buffers": self._buffers,
            "autocast": self._autocast,
            "ema": self._ema,
            "around": around,
            "writes": self._evaluation_writes,
        }

    def _make_state(self) -> EngineState:
        return EngineState(
            self.model,
            self.optimizers,
            self._names,
            trainable=self._trainable,
            buffers=self._buffers,
            scaler=self._scaler,
            ema=self._ema,
            compression=self._compression,
        )

    def _check_emulation(self, job: Job) -> None:
        """Raises Unsupported for what an engine cannot honour whose steps are not its own."""
        held = job.precision.gradients
        asked = job.emulation.option if held == "fp32" else f"precision.gradients={held}"
        if asked and not self.emulates:
            raise Unsupported(
                f"this strategy cannot honour {asked}",
                fix="leave it out, or use strategy=ddp, fsdp or single",
            )

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """Those that train."""
        return self._trainable.parameters

    # -- one step -------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        self._buffers.begin_step(micro_batches[0].place)
        if self._compression is not None:
            self._compression.begin(self._loss_scale)
        parts = self._run_micro_batches(micro_batches, total_weight, task)
        self._buffers.end_step()
        return LossReport(tuple(parts))

    def _run_micro_batches(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> Sequence[tuple[Tensor, float]]:
        """Loss and weight of each; gradients are added up, and communicated."""
        *others, last = micro_batches
        if not others and self._held is None:
            return [self._micro_batch(last, total_weight, task, last=True)]
        with self.without_sync():
            parts = [
                self._add_micro_batch(micro, total_weight, task, last=False) for micro in others
            ]
        return [*parts, self._add_micro_batch(last, total_weight, task, last=True)]

    def _add_micro_batch(
        self, micro: MicroBatch, total_weight: float, task: Task, *, last: bool
    ) -> tuple[Tensor, float]:
        """A micro-batch, after which gradients are rounded to the dtype that they are held in."""
        part = self._micro_batch(micro, total_weight, task, last=last)
        self._hold()
        return part

    def _hold(self) -> None:
        """Rounds gradients to the dtype that they are held in, where that is a lower one."""
        if self._held is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            gradients = self._gradients.storage(gradients)
            torch._foreach_copy_(gradients, [g.to(self._held) for g in gradients])

    def _micro_batch(
        self, micro: MicroBatch, total_weight: float, task: Task, *, last: bool
    ) -> tuple[Tensor, float]:
        """Loss and gradients of a micro-batch; the ``last`` of a step communicates."""
        before = self._buffers.before(micro)
        self._forwards += 1
        self._looks = self._forwards in DUE_FORWARDS
        with self._draws.of(micro):  # the backward too, which may run a forward again
            loss = self._forward(micro.batch, task)
            if self._looks:
                self._loss_check.check(loss, micro, total_weight, task)
            factor = micro.weight * self._ranks / total_weight
            if self._scaler is not None:
                factor *= self._scaler.scale
            if last:
                self._settle(loss)
            try:
                self._backpropagate(loss, factor)
            except (RuntimeError, AttributeError, TypeError) as error:
                raise why_no_backward(loss) or error from error
        self._buffers.after(micro, before)
        return loss.detach(), micro.weight

    def _forward(self, batch: Any, task: Task) -> Tensor:
        if self._autocast is None and not self._looks:
            return task.loss(task.forward(self.module, batch), batch)
        with contextlib.ExitStack() as around:
            if self._looks:
                around.enter_context(self._writes.watch_due())
            if self._autocast is not None:
                around.enter_context(torch.autocast(self._device.type, dtype=self._autocast))
            return task.loss(task.forward(self.module, batch), batch)

    def _watch_writes(self, job: Job) -> Writes:
        rounds = job.precision.params != "fp32"
        if not rounds:
            return Writes(self.model, self.comm)
        who = copy_words(f"precision={job.precision.name.replace('-', '_')}")
        return Writes(self.model, self.comm, loses=who, hooks=job.compile is None)

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        with self._stepping():
            outcome = self._clipping.apply(self._parameters, clip, measure_norm=measure_norm)
            self._update(self.optimizers.values(), outcome)
        return outcome

    def _update(self, optimizers: Iterable[Optimizer], outcome: StepOutcome) -> None:
        if not outcome.skipped:
            for optimizer in optimizers:
                optimizer.step()
            if self._ema is not None:
                self._ema.update()
        self._end_step(outcome)

    def _end_step(self, outcome: StepOutcome) -> None:
        if self._scaler is not None:
            self._last = {"loss_scale": self._scaler.scale}
            self._scaler.update(found_nonfinite=outcome.skipped)
        if self._compression is not None:
            self._compression.advance()

    @property
    def loss_scaler(self) -> LossScaler | None:
        return self._scaler

    @property
    def compression(self) -> GradientCompression | None:
        return self._compression

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.scale

    # -- manual optimization --------------------------------------------------------------------

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        self._clipped.clear()
        self._buffers_due = self._buffers_due or sync
        if sync:
            self._settle(loss, shrinks=not self._manual)
        if self._compression is not None:
            self._compression.begin(self._loss_scale)
        if self._scaler is not None:
            loss = loss * self._scaler.scale
        with self._drawing, contextlib.nullcontext() if sync else self.without_sync():
            try:
                run(loss)
            except RuntimeError as error:
                raise why_no_backward(loss) or error from error
        self._hold()

    @contextlib.contextmanager
    def training_forward(self, *, manual: bool = False) -> Iterator[nn.Module]:
        if self._buffers_due:
            self._buffers.begin_step(None)
        self._buffers_due, self._buffers_differ = False, True
        if manual:
            self._settle(None)
        before = self._buffers.look()
        # A task that steps by itself has its optimizers in there, which write to parameters.
        writes = contextlib.nullcontext() if manual else self._writes.watch_forward(alike=False)
        with self._drawing, writes:
            yield self.module
        self._buffers.after(None, before)

    def draw_for(self, micro: MicroBatch) -> None:
        self._drawing = self._draws.of(micro)

    @contextlib.contextmanager
    def evaluation_forward(self) -> Iterator[nn.Module]:
        if self._buffers_differ or self.model.training or self.evaluates_together:
            self._buffers.gather()
            self._buffers_differ = False
        with self._evaluation_writes.watch_evaluation():
            yield self.eval_module

    def clip_one(self, name: str, clip: Clip, *, measure_norm: bool = False) -> Tensor | None:
        optimizer = self.optimizers[name]
        return self._clipped.clip(name, optimizer, clip, measure_norm=measure_norm)

    def step_one(
        self, name: str, clip: Clip = Clip(), *, measure_norm: bool = False
    ) -> StepOutcome:
        with self._stepping():
            if name not in self._clipped or clip != Clip():
                self.clip_one(name, clip, measure_norm=measure_norm)
            outcome = self._clipped.take(name)
            self._update([self.optimizers[name]], outcome)
        return outcome

    # -- evaluation and state -------------------------------------------------------------------

    def evaluate(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool = False
    ) -> dict[str, Mean]:
        return self._evaluation.evaluate(batches, task, averaged=averaged)

    def predict(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool = False
    ) -> Iterator[Any]:
        return self._evaluation.predict(batches, task, averaged=averaged)

    def state_dict(self) -> dict[str, Any]:
        return self._state.save()

    def expect(self, saved: Mapping[str, Any]) -> None:
        self._trainable.replay(self.optimizers, saved)
        self._settle(None)
        self._state.expect(saved)

    def state_template(self) -> dict[str, Any]:
        with self._stepping():
            self._state.materialise()
            return self._state.make_template(self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.load(state)

    def last_step(self) -> Mapping[str, float]:
        return dict(self._last)

    def changing_buffers(self) -> Sequence[str]:
        return self._buffers.changing

    def traffic(self) -> Traffic | None:
        return None if self._compression is None else self._compression.traffic

    def close(self) -> None:
        self.zero_grad()

    # -- what a hook or a callback frees or freezes ----------------------------------------------

    def _settle(self, loss: Tensor | None, *, shrinks: bool = True) -> bool:
        """Follows what was freed or frozen since it was last called, and says whether any was.

        The backward of ``loss`` is next, if there is one. Without ``shrinks`` nothing that is
        frozen is dropped. Collective where something has changed.

        Raises:
            ConfigError: other processes have freed or frozen others.
            Unsupported: this engine cannot follow.
        """
        change = self._trainable.find_change(shrinks=shrinks and not self.keeps_frozen)
        if change is None:
            return False
        if change.freed or change.frozen:
            agree(change, self.comm)
        self._follow(change)
        self._trainable.take(change)
        if self._ema is not None:
            self._ema.add(change.freed)
        return True

    # -- what a subclass says otherwise ---------------------------------------------------------

    def _follow(self, change: Change) -> None:
        """Takes care of ``change``, the same on every rank, before it is the engine's own.

        Raises:
            Unsupported: this engine cannot.
        """

    def _backpropagate(self, loss: Tensor, factor: float) -> None:
        """Adds ``factor`` times the gradient of ``loss`` to the gradients."""
        self._run_backward(loss, factor)

    def _stepping(self) -> contextlib.AbstractContextManager[None]:
        """Around whatever steps an optimizer, or makes its state."""
        return _NOTHING


def _forget_state(optimizer: Optimizer) -> None:
    local_optimizer(optimizer).state.clear()
