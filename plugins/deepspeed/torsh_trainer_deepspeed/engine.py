"""An engine over deepspeed.initialize: its gradients and steps, our meaning of both."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.base import Clip, Job, LossReport, MicroBatch, StepOutcome
from torsh_trainer.strategies.native import NativeEngine
from torsh_trainer.strategies.state import load_optimizers, own_attributes
from torsh_trainer.strategies.trainability import SINCE_FREED, SINCE_FROZEN, Change
from torsh_trainer.strategies.writes import Writes
from torsh_trainer.tasks.base import Task
from torsh_trainer_deepspeed.files import Files, SwapFolder, put
from torsh_trainer_deepspeed.library import Replacement
from torsh_trainer_deepspeed.shards import (
    Piece,
    Shards,
    find_own_part,
    find_partitioned_pieces,
    find_replicated_pieces,
)


class DeepSpeedEngine(NativeEngine):
    """Stage 0: DeepSpeed holds whole parameters in fp32 and reduces their gradients.

    Gradients are summed over ranks; where DeepSpeed can only average them, ``averaging_ranks``
    undoes that. It would also divide by the number of accumulated micro-batches, which it is told
    not to do. ``replacement`` are the functions that it would replace in the whole process.
    """

    emulates = False
    clips_values = True

    def __init__(
        self,
        wrapped: Any,
        job: Job,
        comm: Communicator,
        *,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        max_norm: float | None,
        autocast: bool,
        replacement: Replacement,
    ) -> None:
        super().__init__(
            job,
            comm,
            model=model,
            module=wrapped,
            eval_module=wrapped,
            averaging_ranks=comm.world.size if wrapped.gradient_average else 1,
            optimizers=optimizers,
            autocasts=autocast,
        )
        self._wrapped = wrapped
        self._sums, self._means = not wrapped.gradient_average, wrapped.gradient_average
        self._prologue = _alone_in_backward(wrapped)
        self._max_norm = max_norm
        self._replacement = replacement
        replacement.within(model)
        self._used: set[str] = set()  # those that a backward of this step has added to
        self._reached: set[str] = set()  # those that this backward has
        self._repeated: set[str] = set()  # and several times
        self._clip_ahead = Clip()
        self._hooks = [
            p.register_post_accumulate_grad_hook(_noting(self._reached, self._repeated, name))
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        wrapped.set_gradient_accumulation_boundary(True)

    def _watch_writes(self, job: Job) -> Writes:
        stage = self.module.zero_optimization_stage()  # type: ignore[operator]
        if not stage:
            return super()._watch_writes(job)
        why = "what DeepSpeed steps are copies of its own, and what is written is lost"
        hooks = stage == 3 and job.compile is None
        return Writes(
            self.model,
            self.comm,
            loses=("strategy=deepspeed", why),
            hooks=hooks,
            is_gathered=_is_gathered,
        )

    def _follow(self, change: Change) -> None:
        # DeepSpeed averages whatever trains; what is noted here is whether it was reached.
        self._hooks += [
            p.register_post_accumulate_grad_hook(_noting(self._reached, self._repeated, name))
            for name, p in change.freed.items()
        ]

    # -- one step -------------------------------------------------------------------------------

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        self._reduce_to(mean=False)
        self._used.clear()
        report = super().forward_backward(micro_batches, total_weight, task)
        if len(self._used) < len(self._hooks):
            self._refuse_unused()
        return report

    def _refuse_unused(self) -> None:
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        unused = [name for name in trained if name not in self._used]
        if not unused:
            return
        raise Unsupported(
            f"{len(unused)} parameters got no gradient, {unused[0]!r} among them, and DeepSpeed "
            "would update them as if theirs were zero",
            fix="freeze them (trainer.frozen), or use strategy=ddp "
            "strategy.find_unused_parameters=true",
            strategy="deepspeed",
            unused=unused,
        )

    def _reduce_to(self, *, mean: bool) -> None:
        """Makes what a gradient becomes the mean, or the sum, over ranks."""
        if self._sums and mean != self._means:
            self._means = mean
            for holder in (self._wrapped, self._wrapped.optimizer):
                if hasattr(holder, "gradient_average"):
                    holder.gradient_average = mean

    def _backpropagate(self, loss: Tensor, factor: float) -> None:
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise TypeError("no scalar with a gradient")
        self._reached.clear()
        scaled = loss * factor
        scaled.register_hook(self._begin)
        try:
            with self._replacement.in_force():
                self._wrapped.backward(scaled, scale_wrt_gas=False)
        except AssertionError as error:
            if not self._repeated and "already been reduced" not in str(error):
                raise
            raise self._refuse_repeated() from error
        if self._repeated and self._sends_early:
            raise self._refuse_repeated()
        self._used |= self._reached

    def _begin(self, _: Tensor) -> None:
        """What DeepSpeed does at the beginning of its backward."""
        self._prologue()

    _sends_early = False
    """A gradient leaves in the backward that made it, and nothing may be added to it later."""

    def _refuse_repeated(self) -> Unsupported:
        name = f"the parameter {min(self._repeated)!r}" if self._repeated else "a parameter"
        return Unsupported(
            f"backward has added several times to the gradient of {name} (a layer that is used "
            "several times under torch.utils.checkpoint with use_reentrant=True), and DeepSpeed "
            "sends it to the other processes after the first time",
            fix="give that checkpoint use_reentrant=False, or set strategy.stage=0 or strategy=ddp "
            "strategy.overlap=false",
            strategy="deepspeed",
        )

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        self._wrapped.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._wrapped.set_gradient_accumulation_boundary(True)

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        bounded = self._limit_clip(clip)
        outcome = self._clipping.apply(self._parameters, bounded, measure_norm=measure_norm)
        if outcome.skipped:
            self.zero_grad()
        else:
            self._wrapped.step()
            if self._ema is not None:
                self._ema.update()
        self._end_step(outcome)
        return outcome

    def _limit_clip(self, clip: Clip) -> Clip:
        """``clip``, or the bound that a file of DeepSpeed's sets where the run sets none."""
        return clip if clip.norm is not None else Clip(self._max_norm, clip.value)

    # -- manual optimization --------------------------------------------------------------------

    def backward(
        self, loss: Tensor, *, sync: bool = True, run: Callable[[Tensor], object] = Tensor.backward
    ) -> None:
        if run is not Tensor.backward:
            raise Unsupported(
                "strategy=deepspeed runs the backward itself, and the task brings one of its own",
                fix="take it out, or use strategy=ddp or strategy=fsdp",
                strategy="deepspeed",
            )
        self._reduce_to(mean=True)
        if sync:
            self._settle(loss, shrinks=not self._manual)
        with contextlib.nullcontext() if sync else self.without_sync():
            self._backpropagate(loss, self._loss_scale)
        if sync:
            if len(self._used) < len(self._hooks):
                self._refuse_unused()
            self._used.clear()

    def step_one(
        self, name: str, clip: Clip = Clip(), *, measure_norm: bool = False
    ) -> StepOutcome:
        assert name in self.optimizers
        ahead, self._clip_ahead = self._clip_ahead, Clip()
        return self.step(ahead if clip == Clip() else clip, measure_norm=measure_norm)

    def clip_one(self, name: str, clip: Clip, *, measure_norm: bool = False) -> Tensor | None:
        if clip.value is not None and not self.clips_values:
            raise _no_value_clipping()
        self._clip_ahead = clip  # gradients are DeepSpeed's until it steps
        return None

    # -- what differs ---------------------------------------------------------------------------

    def close(self) -> None:
        self.zero_grad()
        for hook in self._hooks:
            hook.remove()
        self._wrapped.destroy()


class ZeroEngine(DeepSpeedEngine):
    """Stages 1 to 3: every rank holds, and updates, its part of the fp32 master weights.

    What ``optimizers`` names are the task's own, over the model's parameters: their groups are
    where learning rates are set and what a checkpoint knows settings by. ``inner`` steps the
    partitions; it has groups of its own, which take over those settings before each step.
    ``masters`` are the fp32 values by parameter, where DeepSpeed has rounded the model's.
    ``folders`` hold files of this engine's alone, which go with it.
    """

    clips_values = False
    whole_optimizers = False

    def __init__(
        self,
        wrapped: Any,
        job: Job,
        comm: Communicator,
        *,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        max_norm: float | None,
        autocast: bool,
        replacement: Replacement,
        masters: Mapping[str, Tensor],
        folders: Sequence[SwapFolder] = (),
    ) -> None:
        super().__init__(
            wrapped,
            job,
            comm,
            model=model,
            optimizers=optimizers,
            max_norm=max_norm,
            autocast=autocast,
            replacement=replacement,
        )
        self._zero = wrapped.optimizer
        self._inner: Optimizer = self._zero.optimizer
        self._partitioned = self.evaluates_together = hasattr(self._zero, "fp16_groups")
        self._frozen = self._frozen_values(masters)
        cut = find_partitioned_pieces if self._partitioned else find_replicated_pieces
        pieces = cut(self._zero, comm.world.rank)
        self._folders = folders
        self._files = Files(self._zero)
        if comm.world.is_rank_zero:
            self._files.tell()
        self._shards = Shards(
            model,
            comm,
            self._inner,
            pieces,
            self._flats(),
            self._files,
            fixed=self._frozen_value,
            push=self._push,
        )
        self._restore(masters, pieces)
        zero = self._zero
        early = ("partition_gradients", "overlap_comm")
        self._sends_early = self._partitioned or any(getattr(zero, key, False) for key in early)
        self._shares = self._shares_of_sum = 1
        if not self._sums and hasattr(zero, "override_loss_scale"):
            self._shares_of_sum = comm.world.size
        if self._scaler is not None:
            self._tell_scale()

    # -- one step -------------------------------------------------------------------------------

    def _settle(self, loss: Tensor | None, *, shrinks: bool = True) -> bool:
        """Refuses what was freed for its optimizer, or frozen: the partitions are cut for good."""
        freed = [p for p in self._trainable.others if p.requires_grad]
        if freed:
            (optimizer,) = self.optimizers.values()
            stepped = {p for group in optimizer.param_groups for p in group["params"]}
            # At stage 3 Lightning takes any parameter for one that the optimizer has already: it
            # compares values, and between two passes none has any.
            self._refuse(SINCE_FREED, [p for p in freed if self._partitioned or p in stepped])
        if shrinks:
            self._refuse(SINCE_FROZEN, [p for p in self._parameters if not p.requires_grad])
        return False

    def _refuse(self, how: str, parameters: Sequence[nn.Parameter]) -> None:
        if parameters:
            names = [self._names[id(p)] for p in parameters[:4]]
            raise Unsupported(
                f"strategy=deepspeed cannot honour parameters that {how}: {', '.join(names)}",
                fix="set strategy.stage=0 or strategy=ddp, or let them train from beginning to "
                "end, at a rate of 0 meanwhile",
                strategy="deepspeed",
            )

    def _backpropagate(self, loss: Tensor, factor: float) -> None:
        # DeepSpeed multiplies by the scale itself, and divides the gradients by it in its step.
        try:
            super()._backpropagate(loss, factor / self._loss_scale)
        except RuntimeError as error:
            if not self._partitioned or not _OF_FREED.search(str(error)):
                raise
            raise Unsupported(
                "backward has met a parameter that stage 3 of DeepSpeed had freed: a loss that "
                "takes a gradient itself (torch.autograd.grad), or reads parameters outside of the "
                f"modules that they belong to, cannot be trained with it ({error})",
                fix="set strategy.stage=2, or use strategy=ddp",
                strategy="deepspeed",
            ) from error

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        if clip.value is not None:
            raise _no_value_clipping()
        (optimizer,) = self.optimizers.values()
        for ours, group in zip(optimizer.param_groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in ours.items() if key in group.keys() - _OWN})
        self._zero.clip_grad = self._limit_clip(clip).norm or 0.0
        self._wrapped.step()
        norm = torch.as_tensor(self._zero._global_grad_norm, device=self._device).float()
        outcome = StepOutcome(norm, skipped=bool(self._zero.overflow))
        if outcome.skipped:
            self._files.drop_gradients()
        elif self._ema is not None:
            self._ema.update()
        self._end_step(outcome)
        if self._scaler is not None:
            self._tell_scale()
        return outcome

    def _reduce_to(self, *, mean: bool) -> None:
        """Where DeepSpeed can only average, it unscales by so much less what is to be a sum."""
        super()._reduce_to(mean=mean)
        shares = 1 if mean else self._shares_of_sum
        if shares != self._shares:
            self._shares = shares
            self._tell_scale()

    def _tell_scale(self) -> None:
        self._zero.override_loss_scale(self._loss_scale / self._shares)

    def close(self) -> None:
        super().close()
        self._files.close()
        for folder in self._folders:
            folder.remove()

    @contextlib.contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """Between its uses a parameter of stage 3 has no elements: memory of one stands for all."""
        empty: list[Any] = [p for p in self.model.parameters() if self._partitioned]
        kept = [p.data for p in empty]
        for parameter in empty:
            parameter.data = parameter.data.new_zeros(()).expand(parameter.ds_shape)
        try:
            yield
        finally:
            for parameter, data in zip(empty, kept, strict=True):
                parameter.data = data

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["model"] = self._shards.model()
        (name,) = self.optimizers
        state["optimizer"] = {name: {**state["optimizer"][name], "state": self._shards.optimizer()}}
        return state

    def state_template(self) -> dict[str, Any]:
        self._shards.materialise()
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        settings = {
            name: {"state": {}, "groups": saved["groups"]}
            for name, saved in state["optimizer"].items()
        }
        load_optimizers(self.optimizers, settings, self._names)
        (name,) = self.optimizers
        self._shards.load(state["model"], state["optimizer"][name]["state"])
        self._state.load_beside(state)
        if self._scaler is not None:
            self._tell_scale()
        self._buffers.load(state.get("buffers", {}))

    def _flats(self) -> list[list[Tensor]]:
        """The partitions of each group of the inner optimizer."""
        if not self._partitioned:
            return [list(group["params"]) for group in self._inner.param_groups]
        flats: list[list[Tensor]] = [[] for _ in self._inner.param_groups]
        for index, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            flats[self._zero.sub_group_to_group_id[index]].append(flat)
        return flats

    @torch.no_grad()
    def _frozen_values(self, masters: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Those of frozen parameters before they were rounded: this rank's part under stage 3."""
        kept = {}
        for name, p in self.model.named_parameters():
            if name in masters and not p.requires_grad:
                whole = masters[name]
                if self._partitioned:
                    whole = (
                        whole.flatten().narrow(0, *find_own_part(p, self.comm.world.rank)).clone()
                    )
                kept[id(p)] = whole
        return kept

    def _frozen_value(self, name: str, parameter: Any) -> Tensor | FlatShard:
        kept = self._frozen.get(id(parameter))
        if not self._partitioned:
            return parameter.detach() if kept is None else kept
        offset, numel = find_own_part(parameter, self.comm.world.rank)
        if kept is None:
            kept = parameter.ds_tensor.detach().narrow(0, 0, numel)
        return FlatShard(name, tuple(parameter.ds_shape), offset, kept)

    @torch.no_grad()
    def _restore(self, masters: Mapping[str, Tensor], pieces: Mapping[int, Piece]) -> None:
        """The master weights as they were before DeepSpeed rounded the model."""
        for name, p in self.model.named_parameters():
            if name in masters and id(p) in pieces:
                piece = pieces[id(p)]
                part = masters[name].flatten().narrow(0, piece.offset, piece.numel)
                piece.within(self._files.whole(piece.flat, of=piece.flat)).copy_(part)
        self._files.flush()

    @torch.no_grad()
    def _push(self) -> None:
        """Master weights into the parameters that forward uses, on every rank."""
        zero = self._zero
        parameter: Any  # stage 3 adds to a torch parameter what it needs
        for parameter in self.model.parameters():
            kept = self._frozen.get(id(parameter))
            if kept is not None and self._partitioned:
                put(kept, parameter)
            elif kept is not None:
                parameter.copy_(kept)
        if not self._partitioned:
            zero.update_lp_params()
            return
        # As DeepSpeed's own step ends.
        zero._partition_all_parameters()
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            with self._files.lend(flat):
                zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


_OF_FREED = re.compile(
    r"\[0\]|\(0\)|size 0|must be a matrix|invalid gradient|shapes cannot be multiplied"
)
"""What torch says of a tensor without elements where it expects a parameter."""

_OWN = {"params", "param_names"}
"""What a group of the inner optimizer does not take over."""


def without_state(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same kind and settings, with groups and state of its own."""
    other: Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(own_attributes(optimizer))
    other.param_groups = [dict(group) for group in optimizer.param_groups]
    other.state = type(optimizer.state)(dict)
    return other


def _noting(added: set[str], again: set[str], name: str) -> Callable[[Tensor], None]:
    def note(_: Tensor) -> None:
        if name in added:
            again.add(name)
        added.add(name)

    return note


def _alone_in_backward(wrapped: Any) -> Callable[[], None]:
    """Gives what begins DeepSpeed's backward, which then no other does.

    DeepSpeed takes any gradient of the model's outputs for the step's own, and divides it by the
    number of micro-batches: torch.autograd.grad within a loss would give another gradient.
    """
    prologue: Callable[[], None] = wrapped._backward_prologue
    wrapped._backward_prologue = lambda: None
    wrapped._backward_prologue_per_tensor = lambda gradient: gradient
    return prologue


def _no_value_clipping() -> Unsupported:
    return Unsupported(
        "strategy=deepspeed cannot honour trainer.max_grad_value from stage 1 on",
        fix="use trainer.max_grad_norm, strategy.stage=0, or strategy=fsdp",
        strategy="deepspeed",
    )


def _is_gathered(parameter: Tensor) -> bool:
    """Whether stage 3 has a parameter's values in place; the other stages always have."""
    status = getattr(parameter, "ds_status", None)
    return status is None or status.name == "AVAILABLE"
