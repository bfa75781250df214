"""What the native engines share: micro-batches, clipping, stepping, evaluation, state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.wire import Traffic
from torsh_trainer.ema import Ema
from torsh_trainer.errors import Unsupported
from torsh_trainer.loss_scaling import LossScaler
from torsh_trainer.precision import DTypeName, Precision
from torsh_trainer.randomness import draws_of
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import (
    Clip,
    Engine,
    Job,
    LossReport,
    MicroBatch,
    StepOutcome,
    Strategy,
)
from torsh_trainer.strategies.buffers import Buffers
from torsh_trainer.strategies.compressing import Compressed
from torsh_trainer.strategies.state import (
    load_model,
    load_optimizers,
    local_optimizer,
    materialise_slots,
    optimizer_state,
)
from torsh_trainer.strategies.trained import Change, agree, change_of, has_changed, noted, replayed
from torsh_trainer.task import Mean, Task, sum_of, why_no_backward

DTYPES: dict[DTypeName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class NativeEngine(Engine):
    """One process's engine on plain torch; by itself it is the engine of ``single``.

    ``module`` is what ``task.forward`` calls while training (a wrapper around ``model``),
    ``eval_module`` what it calls in evaluation. ``averaging_ranks`` is by how many ranks the
    wrapper divides the summed gradient, so that the loss can be scaled to undo it. ``compression``
    is told of every backward and step, and its state goes into a checkpoint. ``optimizers`` are the
    job's where they had to be built before the wrapper. With ``broadcast_buffers`` what a training
    forward changes is rank 0's in every step.
    """

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
        wrap_optimizer: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer,
        compression: Compressed | None = None,
        optimizers: Mapping[str, Optimizer] | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        self.model = model
        self.module = module
        self.eval_module = eval_module
        self.comm = comm
        self._ranks = averaging_ranks * gradient_scale
        self._manual = job.manual
        self._named = dict(model.named_parameters())
        self._parameters = [p for p in self._named.values() if p.requires_grad]
        self._others = [p for p in self._named.values() if not p.requires_grad]
        self._at_start = {name: p.requires_grad for name, p in self._named.items()}
        self._names = {id(p): name for name, p in self._named.items()}
        sparse = {model.get_submodule(n).weight for n in modules.sparse_embeddings(model)}
        self._sparse = bool(sparse)
        self._complex = [name for name, p in self._named.items() if p.is_complex()]
        self._check_bound(job.clip)
        built = optimizers or job.build_optimizers(model.named_parameters())
        for optimizer in built.values() if sparse else ():
            modules.step_sparse(optimizer, sparse)  # type: ignore[arg-type]
        self.optimizers = {name: wrap_optimizer(optimizer) for name, optimizer in built.items()}
        self._compression = compression
        self._device = comm.device
        self._kept = (1.0, torch.ones((), device=comm.device))
        self.randomness = modules.randomness_of(job)
        self._draws = draws_of(self.randomness, model, comm.device)
        self._drawing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._autocast = DTYPES[job.precision.compute] if job.precision.autocast else None
        self._scaler = LossScaler(job.precision.loss_scaling) if job.precision.scales_loss else None
        self._last: dict[str, float] = {}
        self._clipped: dict[str, StepOutcome] = {}  # by optimizer, what its step will apply
        self._buffers = Buffers(
            model,
            comm,
            shares=broadcast_buffers,
            averages=job.task.running_averages(model),
        )
        self._buffers_due = True  # the next training forward begins a step
        self._buffers_differ = True  # between ranks, for all that an evaluation knows
        self._skip_nonfinite = job.skip_nonfinite or self._scaler is not None
        self._held = None if job.precision.gradients == "fp32" else DTYPES[job.precision.gradients]
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._ema = None if job.ema_decay is None else Ema(trainable, decay=job.ema_decay)
        self._refuse_emulation(job)
        if job.phantom_lr is not None:
            self._phantom_step(job.phantom_lr, keeps_state=job.phantom_state)

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
        *others, last = micro_batches
        if not others and self._held is None:
            parts = [self._micro_batch(last, total_weight, task, last=True)]
        else:
            with self.without_sync():
                parts = [self._added(micro, total_weight, task, last=False) for micro in others]
            parts.append(self._added(last, total_weight, task, last=True))
        self._buffers.end_step()
        return LossReport(tuple(parts))

    def _added(
        self, micro: MicroBatch, total_weight: float, task: Task, *, last: bool
    ) -> tuple[Tensor, float]:
        """A micro-batch, after which gradients are rounded to the dtype that they are held in."""
        part = self._micro_batch(micro, total_weight, task, last=last)
        self._hold()
        return part

    def _hold(self) -> None:
        """Rounds gradients to the dtype that they are held in, where that is a lower one."""
        if self._held is not None:
            gradients = self._local([p.grad for p in self._parameters if p.grad is not None])
            torch._foreach_copy_(gradients, [g.to(self._held) for g in gradients])

    def _micro_batch(
        self, micro: MicroBatch, total_weight: float, task: Task, *, last: bool
    ) -> tuple[Tensor, float]:
        """Loss and gradients of a micro-batch; the ``last`` of a step communicates."""
        before = self._buffers.before(micro)
        with self._draws.of(micro):  # the backward too, which may run a forward again
            loss = self._forward(micro.batch, task)
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
        if self._autocast is None:
            return task.loss(task.forward(self.module, batch), batch)
        with torch.autocast(self._device.type, dtype=self._autocast):
            return task.loss(task.forward(self.module, batch), batch)

    def _gradient(self, factor: float, loss: Tensor) -> Tensor:
        """``factor`` as a 0-dim tensor beside ``loss``; the last one is kept, it rarely changes."""
        kept, gradient = self._kept
        if kept != factor or gradient.dtype != loss.dtype:
            gradient = torch.full((), factor, dtype=loss.dtype, device=loss.device)
            self._kept = (factor, gradient)
        return gradient

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        outcome = self._unscale_and_clip(self._parameters, clip, measure_norm=measure_norm)
        if not outcome.skipped:
            for optimizer in self.optimizers.values():
                optimizer.step()
            if self._ema is not None:
                self._ema.update()
        self._stepped(outcome)
        return outcome

    def _stepped(self, outcome: StepOutcome) -> None:
        if self._scaler is not None:
            self._last = {"loss_scale": self._scaler.scale}
            self._scaler.update(found_nonfinite=outcome.skipped)
        if self._compression is not None:
            self._compression.advance()

    @property
    def loss_scaler(self) -> LossScaler | None:
        return self._scaler

    @property
    def compression(self) -> Compressed | None:
        return self._compression

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.scale

    def _unscale_and_clip(
        self,
        parameters: Iterable[nn.Parameter],
        clip: Clip,
        *,
        measure_norm: bool,
        scaled: bool = True,
    ) -> StepOutcome:
        scaler = self._scaler if scaled else None
        wants_norm = measure_norm or clip.norm is not None or self._skip_nonfinite
        if not wants_norm and clip.value is None:
            return _APPLIED
        if self._sparse:
            _coalesce(parameters)
        gradients = self._local([p.grad for p in parameters if p.grad is not None])
        if scaler is not None:
            torch._foreach_mul_(gradients, 1.0 / scaler.scale)
        if clip.value is not None:
            self._check_bound(clip)
        norm = self._norm(gradients) if wants_norm else None
        if norm is not None and self._skip_nonfinite and not bool(torch.isfinite(norm)):
            return StepOutcome(norm, skipped=True)
        if scaler is not None and scaler.divisor != scaler.scale:
            share = scaler.scale / scaler.divisor
            torch._foreach_mul_(gradients, share)
            clipped = None if norm is None else norm * share
        else:
            clipped = norm
        if clipped is not None and clip.norm is not None:
            # The formula of torch.nn.utils.clip_grad_norm_, epsilon included.
            coefficient = torch.clamp(clip.norm / (clipped + 1e-6), max=1.0)
            _foreach_scale(gradients, coefficient)
        if clip.value is not None:
            torch._foreach_clamp_min_(gradients, -clip.value)
            torch._foreach_clamp_max_(gradients, clip.value)
        return StepOutcome(norm, skipped=False)

    def _check_bound(self, clip: Clip) -> None:
        """Raises Unsupported where torch has no clamp for a gradient."""
        if clip.value is not None and self._complex:
            raise Unsupported(
                f"trainer.max_grad_value={clip.value} bounds each number of a gradient, and the "
                f"parameter {self._complex[0]!r} is complex, which torch does not order",
                fix="set trainer.max_grad_norm instead",
            )

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
        with self._drawing:
            yield self.module
        self._buffers.after(None, before)

    def draw_for(self, micro: MicroBatch) -> None:
        self._drawing = self._draws.of(micro)

    @contextlib.contextmanager
    def evaluation_forward(self) -> Iterator[nn.Module]:
        if self._buffers_differ or self.model.training or self.evaluates_together:
            self._buffers.gather()
            self._buffers_differ = False
        yield self.eval_module

    def clip_one(self, name: str, clip: Clip, *, measure_norm: bool = False) -> Tensor | None:
        before = self._clipped.get(name)
        if before is not None and before.skipped:
            return before.grad_norm
        groups = self.optimizers[name].param_groups
        outcome = self._clipped[name] = self._unscale_and_clip(
            [p for group in groups for p in group["params"]],
            clip,
            measure_norm=measure_norm,
            scaled=before is None,
        )
        return outcome.grad_norm

    def step_one(
        self, name: str, clip: Clip = Clip(), *, measure_norm: bool = False
    ) -> StepOutcome:
        if name not in self._clipped or clip != Clip():
            self.clip_one(name, clip, measure_norm=measure_norm)
        outcome = self._clipped.pop(name)
        if not outcome.skipped:
            self.optimizers[name].step()
            if self._ema is not None:
                self._ema.update()
        self._stepped(outcome)
        return outcome

    # -- evaluation -----------------------------------------------------------------------------

    def evaluate(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool = False
    ) -> dict[str, Mean]:
        parts: dict[str, list[Mean]] = {}
        with self._evaluating(averaged=averaged):
            for batch, counts in batches:
                metrics = task.evaluate(self.eval_module, batch)
                if counts:
                    for name, mean in metrics.items():
                        parts.setdefault(name, []).append(mean)
        return {name: sum_of(name, means) for name, means in parts.items()}

    def predict(
        self, batches: Iterable[tuple[Any, bool]], task: Task, *, averaged: bool = False
    ) -> Iterator[Any]:
        with self._evaluating(averaged=averaged):
            for batch, counts in batches:
                outputs = task.predict(self.eval_module, batch)
                if counts:
                    yield outputs

    @contextlib.contextmanager
    def _evaluating(self, *, averaged: bool) -> Iterator[None]:
        self._buffers.gather()
        training = self.model.training
        swapped = self._ema.swapped() if averaged and self._ema else contextlib.nullcontext()
        precision = (
            contextlib.nullcontext()
            if self._autocast is None
            else torch.autocast(self._device.type, dtype=self._autocast)
        )
        self.eval_module.eval()
        try:
            with torch.no_grad(), swapped, precision:
                yield
        finally:
            self.eval_module.train(training)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._buffers.gather()
        state: dict[str, Any] = {
            "model": dict(self.model.state_dict()),
            "optimizer": {
                name: optimizer_state(optimizer, self._names)
                for name, optimizer in self.optimizers.items()
            },
        }
        if self._scaler is not None:
            state["loss_scale"] = self._scaler.state_dict()
        if self._ema is not None:
            state["ema"] = self._ema.state_dict()
        if self._compression is not None:
            state["compression"] = self._compression.state_dict()
        buffers = self._buffers.state_dict()
        if buffers:
            state["buffers"] = buffers
        trains = noted(self._named, self._at_start)
        if trains:
            state["trains"] = trains
        return state

    def expect(self, saved: Mapping[str, Any]) -> None:
        replayed(self._named, self.optimizers, saved)
        self._settle(None)
        if self._compression is not None:
            self._compression.expect(saved.get("compression", {}))
        self._buffers.expect(saved.get("buffers", {}))

    def state_template(self) -> dict[str, Any]:
        for optimizer in self.optimizers.values():
            materialise_slots(optimizer)
        state = self.state_dict()
        if self._compression is not None:
            state["compression"] = self._compression.template()
        buffers = self._buffers.template()
        if buffers:
            state["buffers"] = buffers
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_model(self.model, state["model"])
        load_optimizers(self.optimizers, state["optimizer"], self._names)
        if self._scaler is not None and "loss_scale" in state:
            self._scaler.load_state_dict(state["loss_scale"])
        if self._ema is not None and "ema" in state:
            self._ema.load_state_dict(state["ema"])
        if self._compression is not None:
            self._compression.load(state.get("compression", {}))
        self._buffers.load(state.get("buffers", {}))

    def last_step(self) -> Mapping[str, float]:
        return dict(self._last)

    def changing_buffers(self) -> Sequence[str]:
        return self._buffers.changing

    def traffic(self) -> Traffic | None:
        return None if self._compression is None else self._compression.traffic

    def close(self) -> None:
        self.zero_grad()

    # -- as another engine has begun -------------------------------------------------------------

    emulates: ClassVar[bool] = True
    """``precision.gradients`` and ``trainer.phantom_lr`` are honoured."""

    def _refuse_emulation(self, job: Job) -> None:
        asked = {
            f"precision.gradients={job.precision.gradients}": self._held is not None,
            f"trainer.phantom_lr={job.phantom_lr}": job.phantom_lr is not None,
        }
        for option, wanted in asked.items():
            if wanted and not self.emulates:
                raise Unsupported(
                    f"this strategy cannot honour {option}",
                    fix="leave it out, or use strategy=ddp, fsdp or single",
                )

    @torch.no_grad()
    def _phantom_step(self, lr: float, *, keeps_state: bool) -> None:
        """One step of every optimizer with gradients of zero, at ``lr``."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in self.optimizers.values():
            kept = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            for group, own in zip(optimizer.param_groups, kept, strict=True):
                group["lr"] = own
            if not keeps_state:
                local_optimizer(optimizer).state.clear()
        self.zero_grad()

    # -- what a hook or a callback frees or freezes ----------------------------------------------

    keeps_frozen = False
    """What trained and is frozen stays among those that take part, as one that no loss reaches."""

    def _settle(self, loss: Tensor | None, *, shrinks: bool = True) -> bool:
        """Follows what was freed or frozen since it was last called, and says whether any was.

        The backward of ``loss`` is next, if there is one. Without ``shrinks`` nothing that is
        frozen is dropped. Collective where something has changed.

        Raises:
            ConfigError: other processes have freed or frozen others.
            Unsupported: this engine cannot follow.
        """
        shrinks = shrinks and not self.keeps_frozen
        if not has_changed(self._parameters, self._others, shrinks=shrinks):
            return False
        change = change_of(self._named, self._parameters, shrinks=shrinks)
        if not change.trained:  # the loss has no gradient, which is said later
            return False
        if change.freed or change.frozen:
            agree(change, self.comm)
        self._follow(change)
        self._parameters, self._others = change.trained, change.others
        if self._ema is not None:
            self._ema.add(change.freed)
        return True

    def _follow(self, change: Change) -> None:
        """Takes care of ``change``, the same on every rank, before it is the engine's own.

        Raises:
            Unsupported: this engine cannot.
        """

    def _zero_unused(self) -> None:
        """Gradients of zero for parameters that no loss of this step has reached."""
        for parameter in self._parameters:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    # -- what a subclass says otherwise ---------------------------------------------------------

    def _backpropagate(self, loss: Tensor, factor: float) -> None:
        """Adds ``factor`` times the gradient of ``loss`` to the gradients."""
        # The factor enters as the gradient of the loss: a product would cost two operations.
        _run_backward(loss, self._gradient(factor, loss))

    def _local(self, gradients: list[Tensor]) -> list[Tensor]:
        """The storage behind gradients, as plain tensors of real numbers."""
        if self._sparse:
            gradients = [g.values() if g.is_sparse else g for g in gradients]
        if self._complex:
            gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
        return gradients

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """The global L2 norm, a 0-dim tensor, the same on every rank."""
        return local_norm(gradients, self._device)


def averages_in(precision: Precision) -> bool:
    """Whether an engine that can do either averages gradients instead of summing them.

    In fp16 a loss that is divided by the number of processes would lose small gradients.
    """
    return precision.scales_loss


def summed_in(dtype: torch.dtype, asked: torch.dtype) -> torch.dtype:
    """In what gradients of ``dtype`` are summed where ``precision.reduce`` is ``asked``.

    fp32 is that or wider; a complex number keeps its two parts.
    """
    if dtype.is_complex or asked is torch.float32:
        return torch.promote_types(dtype, torch.float32)
    return asked


def no_zero_unused(knobs: Strategy) -> Unsupported:
    """The error for ``strategy.zero_unused`` where the task itself steps."""
    return knobs.refuse(
        "strategy.zero_unused=true under manual optimization",
        use="leave it out: the task itself has the gradients",
    )


def local_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The L2 norm over all gradients of this process, float32 or wider."""
    if not gradients:
        return torch.zeros((), device=device)
    wide = torch.float64 if any(g.dtype is torch.float64 for g in gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2.0, dtype=wide)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), 2.0)


def _run_backward(loss: Tensor, gradient: Tensor) -> None:
    """``loss.backward(gradient)`` for a plain 0-dim loss, without 9 us of argument handling."""
    if _ENGINE is None or type(loss) is not Tensor or loss.dim():
        loss.backward(gradient)
    else:
        _ENGINE((loss,), (gradient,), False, False, (), True, True)


_ENGINE: Callable[..., Any] | None = getattr(
    # torch's own name for what Tensor.backward ends in; a release without it takes the long way.
    getattr(torch.autograd.Variable, "_execution_engine", None),
    "run_backward",
    None,
)


def _coalesce(parameters: Iterable[nn.Parameter]) -> None:
    """Sums up what a sparse gradient holds several times: only then has it a norm."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def _foreach_scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies by a 0-dim tensor without reading it on the host."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device))


_APPLIED = StepOutcome(None, skipped=False)
