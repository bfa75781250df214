"""The engine of a model in stages: micro-batches in the order of a schedule, then one step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.strategies.base import Job, LossReport, MicroBatch, StepOutcome
from torsh_trainer.strategies.buffers import Buffers
from torsh_trainer.strategies.engine_state import EngineState
from torsh_trainer.strategies.evaluation import Around, Evaluation
from torsh_trainer.strategies.fsdp import FSDPEngine
from torsh_trainer.strategies.pipeline.crossing import Left, Passage
from torsh_trainer.strategies.pipeline.evaluation import StagedEvaluation
from torsh_trainer.strategies.pipeline.held import HeldStages
from torsh_trainer.strategies.pipeline.orders import order_of
from torsh_trainer.strategies.pipeline.step import Message, PipelineStep, StageForward
from torsh_trainer.strategies.pipeline.task import StageTask
from torsh_trainer.strategies.sharded import ShardedGradients
from torsh_trainer.strategies.trainability import Change, change_error
from torsh_trainer.strategies.writes import DUE_FORWARDS
from torsh_trainer.tasks.base import Task, why_no_backward


class PipelineEngine(FSDPEngine):
    """``fsdp`` within each stage, whose parameters are whole from the first forward of a step to
    its last backward."""

    overlaps = True

    def __init__(self, held: HeldStages, *args: Any, **kwargs: Any) -> None:
        self._held_stages = held
        self._counts = dict.fromkeys(held.own, 0)
        self._groups: dict[str, list[list[str]]] = {}
        super().__init__(*args, **kwargs)
        held.crossing.hook()
        self._alike = held.alike()
        self._weighing: tuple[float, Task] | None = None

    # -- parts that know of stages ----------------------------------------------------------------

    def _build_optimizers(self, job: Job) -> Mapping[str, Optimizer]:
        built, self._groups = self._held_stages.build_optimizers(job, self.model)
        return built

    def name_groups(self) -> Mapping[str, Sequence[Sequence[str]]]:
        return self._groups

    def _make_buffers(self, job: Job, *, shares: bool) -> Buffers:
        held = self._held_stages
        own = {name for name, _ in self.model.named_buffers()}
        averages = {
            name: momentum
            for name, momentum in job.task.running_averages(self.model).items()
            if name in own or name not in held.buffers
        }
        part = f"stage_{held.own[0]}_"
        return Buffers(self.model, self.comm, shares=shares, averages=averages, part=part)

    def _make_evaluation(self, around: Around) -> Evaluation:
        return StagedEvaluation(self._held_stages, **self._evaluation_parts(around))

    def _make_gradients(
        self, model: nn.Module, device: torch.device, norm: Communicator
    ) -> ShardedGradients:
        held = self._held_stages
        return ShardedGradients(
            model,
            device,
            norm_group=norm,
            counts=self._layers.counts,
            counts_whole=held.counts_whole,
            uncounted=held.list_uncounted(model),
        )

    def _make_state(self) -> EngineState:
        made: Any = super()._make_state()
        return EngineState(**{**vars(made), "groups": self._groups})

    def whole_shapes(self) -> contextlib.AbstractContextManager[None]:
        return self._held_stages.crossing.whole()

    # -- a step -----------------------------------------------------------------------------------

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        report = super().forward_backward(micro_batches, total_weight, task)
        self._sum_tied()
        return report

    def _run_micro_batches(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> Sequence[tuple[Tensor, float]]:
        held, knobs = self._held_stages, self._held_stages.knobs
        order = order_of(
            knobs.schedule,
            ranks=held.comm.size,
            stages_per_rank=knobs.stages_per_rank,
            micro_batches=len(micro_batches),
            rank=held.comm.rank,
        )
        self._weighing = total_weight, StageTask(task)
        step = PipelineStep(held, self, micro_batches)
        step.run(order)
        self._settle(torch.zeros(()))
        assert self._pass is not None
        self._pass.reduce(syncs=True)
        losses = self._share_losses([step.losses.get(i) for i in range(len(micro_batches))])
        return [(loss, m.weight) for loss, m in zip(losses, micro_batches, strict=True)]

    def run_forward(self, stage: int, micro: MicroBatch, message: Message | None) -> StageForward:
        """See ``StageWork``."""
        assert self._weighing is not None
        total_weight, task = self._weighing
        before = self._buffers.before(micro)
        self._counts[stage] += 1
        self._looks = self._counts[stage] in DUE_FORWARDS
        received = None if message is None else message.received
        crossing = self._held_stages.crossing

        def go_on() -> None:
            if message is not None:
                self._draws.go_on(message.draws)

        passage = Passage(stage, received, go_on)
        with self._draws.of(micro), crossing.passing(passage, watches=self._looks):
            result: Any = self._forward(micro.batch, task)
            if not isinstance(result, Left):
                crossing.check_end(passage)
                if self._looks:
                    self._loss_check.check(result, micro, total_weight, task)
                error = why_no_backward(result)
                if error is not None:
                    raise error
            state = self.comm.to_device(self._draws.state())
            done = StageForward(result, received, state, self._draws.keep())
        self._buffers.after(micro, before)
        return done

    def run_backward(
        self, micro: MicroBatch, done: StageForward, gradients: Sequence[Tensor] | None
    ) -> None:
        """See ``StageWork``."""
        assert self._weighing is not None
        with self._draws.again(micro, done.draws):
            if gradients is not None:
                assert isinstance(done.result, Left)
                trains = zip(done.result.specs, done.result.tensors, strict=True)
                torch.autograd.backward([t for spec, t in trains if spec.trains], gradients)
                return
            factor = micro.weight * self._ranks / self._weighing[0] * self._loss_scale
            assert isinstance(done.result, Tensor)
            try:
                self._backpropagate(done.result, factor)
            except (RuntimeError, AttributeError, TypeError) as error:
                raise why_no_backward(done.result) or error from error

    def _share_losses(self, losses: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Those of the last stage, on every process of the pipeline."""
        held = self._held_stages
        own = [loss for loss in losses if loss is not None]
        sent = torch.zeros(len(losses), dtype=torch.float64)
        if held.is_last:
            sent = torch.stack([loss.double() for loss in own])
        sent = self.comm.to_device(sent)
        held.comm.broadcast(sent, src=held.last_rank)
        return own if held.is_last else list(sent.unbind())

    def _sum_tied(self) -> None:
        """Gradients of what several stages use: each has those of its own uses."""
        for name, comm in self._held_stages.tied.items():
            parameter: Any = self._trainable.named[name]
            if not parameter.requires_grad:
                continue
            has = torch.tensor([float(parameter.grad is not None)])
            has = self.comm.to_device(has)
            comm.all_reduce(has, op="max")
            if not float(has):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient: Any = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            comm.all_reduce(local)

    def _end_step(self, outcome: StepOutcome) -> None:
        super()._end_step(outcome)
        for alike, name in self._alike:
            alike.check({name: self._trainable.named[name]})

    # -- what stages cannot do --------------------------------------------------------------------

    def _follow(self, change: Change) -> None:
        raise change_error(
            self._knobs, change, use="set mesh.pp=1, or free and freeze them before the run"
        )

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_apart("a backward that the caller makes")

    def training_forward(self, *, manual: bool = False) -> NoReturn:
        self._refuse_apart("a training forward that the caller makes")

    def evaluation_forward(self) -> NoReturn:
        self._refuse_apart("a forward that the caller makes")

    def _refuse_apart(self, what: str) -> NoReturn:
        raise self._knobs.refuse(
            f"{what} beside mesh.pp, where a process has a stage of the model alone",
            use="set mesh.pp=1",
        )

    def close(self) -> None:
        super().close()
        self._held_stages.close()
