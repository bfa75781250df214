"""What runs on every rank in the strategies' suite: one engine, driven as the loop does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.mesh import Groups, MeshOptions
from torsh_trainer.strategies.base import BatchPlan, Clip, Engine, Job, MicroBatch, Strategy
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.tasks.base import Task
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.state import fill, whole_state
from torsh_trainer.testing.tiny import Block, TinyTask, total_weight

_GROUPS: ContextVar[Groups | None] = ContextVar("groups", default=None)


def on_a_mesh(
    comm: Communicator,
    options: MeshOptions,
    case: Callable[..., Any],
    strategy: Strategy,
    *args: Any,
) -> Any:
    """``case`` where several processes have the same samples, as ``options`` say."""
    strategy, mesh = divide(comm.world, strategy, options)
    groups = Groups(mesh, comm)
    token = _GROUPS.set(groups)
    try:
        return case(groups.data, strategy, *args)
    finally:
        _GROUPS.reset(token)
        groups.close()


def _whole_state(engine: Engine, comm: Communicator) -> dict[str, Any]:
    groups = _GROUPS.get()
    return whole_state(engine.state_dict(), comm, None if groups is None else groups.pipeline)


def train(comm: Communicator, strategy: Strategy, scenario: Scenario) -> TrainingOutcome:
    """All steps of the scenario, then an evaluation."""
    driver = Driver(comm, strategy, scenario)
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        driver.step(number, outcome)
    return driver.finish(outcome)


def train_between_evaluations(
    comm: Communicator, strategy: Strategy, scenario: Scenario
) -> TrainingOutcome:
    """As ``train``, with an evaluation before every step."""
    driver = Driver(comm, strategy, scenario)
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        driver.evaluate(averaged=False)
        driver.step(number, outcome)
    return driver.finish(outcome)


def resume(
    comm: Communicator, strategy: Strategy, scenario: Scenario
) -> tuple[TrainingOutcome, TrainingOutcome]:
    """One engine goes all the way; another takes its state before the last step and follows."""
    last = scenario.data.steps - 1
    first = Driver(comm, strategy, scenario)
    outcome = TrainingOutcome()
    for number in range(last):
        first.step(number, outcome)
    saved = _whole_state(first.engine, comm)
    went_on = first.finish(_after(first, last, outcome))

    other_start = replace(scenario, model=replace(scenario.model, seed=7))
    second = Driver(comm, strategy, other_start)
    second.engine.load_state_dict(fill(second.engine.state_template(), saved))
    resumed = second.finish(_after(second, last, TrainingOutcome()))
    return went_on, resumed


def go_on(
    comm: Communicator, strategy: Strategy, scenario: Scenario, path: Path, first: int
) -> TrainingOutcome:
    """Takes a checkpoint's model and optimizer, then all steps from number ``first`` on."""
    driver = Driver(comm, strategy, scenario)
    checkpointer = DcpCheckpointer(path.parent, comm, CheckpointOptions())
    state = {"engine": driver.engine.state_template()}
    driver.engine.load_state_dict(checkpointer.load(state, path=path)["engine"])
    checkpointer.close()
    outcome = TrainingOutcome()
    for number in range(first, scenario.data.steps):
        driver.step(number, outcome)
    return driver.finish(outcome)


def _after(driver: Driver, number: int, outcome: TrainingOutcome) -> TrainingOutcome:
    driver.step(number, outcome)
    return outcome


def predict(comm: Communicator, strategy: Strategy, scenario: Scenario) -> list[Tensor]:
    """Predictions of an engine that has not trained."""
    driver = Driver(comm, strategy, scenario)
    outputs = driver.engine.predict(driver.evaluation(), driver.task)
    return [output.detach().cpu() for output in outputs]


def block_calls(comm: Communicator, strategy: Strategy, scenario: Scenario) -> int:
    """How often blocks ran forward in one step, recomputation included."""
    driver = Driver(comm, strategy, scenario)
    driver.step(0, TrainingOutcome())
    model = driver.engine.model
    driver.engine.close()
    return sum(block.calls for block in model.modules() if isinstance(block, Block))


def refusal(
    comm: Communicator, strategy: Strategy, scenario: Scenario, case: Callable[..., Any]
) -> str:
    """The words of the Unsupported that the case meets; empty when there is none."""
    try:
        case(comm, strategy, scenario)
    except Unsupported as error:
        return str(error)
    return ""


def blame(comm: Communicator, strategy: Strategy, scenario: Scenario, task: type[TinyTask]) -> str:
    """The words of the ConfigError that a step of ``task`` meets; empty when there is none."""
    driver = Driver(comm, strategy, scenario, task=task())
    try:
        driver.step(0, TrainingOutcome())
    except ConfigError as error:
        return str(error)
    return ""


def manual(comm: Communicator, strategy: Strategy, scenario: Scenario) -> dict[str, Tensor]:
    """Some backward passes and a step of the last optimizer, then one and a step of the first."""
    driver = Driver(comm, strategy, scenario)
    engine, task = driver.engine, driver.task
    # The wrapper that communicates, where the engine has one.
    module = getattr(engine, "module", engine.model)
    *before, last = driver.micro_batches(0)
    engine.zero_grad()
    for micro in before:
        engine.backward(task.loss(task.forward(module, micro.batch), micro.batch), sync=False)
    engine.backward(task.loss(task.forward(module, last.batch), last.batch))
    done = engine.step_one(list(engine.optimizers)[-1], measure_norm=True)
    assert done.grad_norm is not None, "measure_norm=True and no norm came back"
    third = driver.micro_batches(1)[0]
    engine.zero_grad()
    engine.backward(task.loss(task.forward(module, third.batch), third.batch))
    engine.step_one(next(iter(engine.optimizers)), Clip(norm=0.1))
    parameters: dict[str, Tensor] = _whole_state(engine, comm)["model"]
    engine.close()
    return parameters


def manual_reference(scenario: Scenario, ranks: int) -> dict[str, Tensor]:
    """What ``manual`` does, in plain PyTorch over the batches of all ranks."""
    task = scenario.task
    model = task.build_model()
    optimizers = list(task.build_optimizers(model.named_parameters()).values())
    for micro_batches in scenario.data.step(0, ranks):
        for micro in micro_batches:
            (task.loss(task.forward(model, micro.batch), micro.batch) / ranks).backward()
    optimizers[-1].step()
    model.zero_grad(set_to_none=True)
    for micro_batches in scenario.data.step(1, ranks):
        batch = micro_batches[0].batch
        (task.loss(task.forward(model, batch), batch) / ranks).backward()
    first = [p for group in optimizers[0].param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(first, 0.1)
    optimizers[0].step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


class VectorLoss(TinyTask):
    """Forgets to take the mean."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        per_sample: Tensor = outputs.mean((1, 2))
        return per_sample


class DetachedLoss(TinyTask):
    """Cuts the loss off from the model."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, batch).detach()


class Driver:
    """Drives one engine on one rank as the loop does."""

    def __init__(
        self,
        comm: Communicator,
        strategy: Strategy,
        scenario: Scenario,
        *,
        task: TinyTask | None = None,
        compile: Mapping[str, Any] | None = None,
    ) -> None:
        self.comm = comm
        self.scenario = scenario
        self.task: Task = task or scenario.task
        self.mesh = strategy.mesh(comm.world)
        data = scenario.data
        job = Job(
            task=self.task,
            build_model=self.task.build_model,
            batch=BatchPlan(
                batch_size=data.samples * data.accumulate * self.mesh.dp,
                micro_batch_size=data.samples,
                accumulate=data.accumulate,
                dp_size=self.mesh.dp,
            ),
            precision=scenario.precision,
            clip=scenario.clip,
            activation_checkpointing=scenario.activation_checkpointing,
            ema_decay=scenario.ema_decay,
            skip_nonfinite=scenario.skip_nonfinite,
            sync_batchnorm=scenario.sync_batchnorm,
            max_steps=data.steps,
            groups=_GROUPS.get(),
            compile=compile,
        )
        self.engine: Engine = strategy.resolve(job, comm).prepare(job, comm)
        self.base_lrs = {
            name: [group["lr"] for group in optimizer.param_groups]
            for name, optimizer in self.engine.optimizers.items()
        }

    def micro_batches(self, number: int) -> list[MicroBatch]:
        """This rank's share of step ``number``, on the device."""
        mine = self.scenario.data.step(number, self.mesh.dp)[self.mesh.dp_rank]
        return [micro._replace(batch=self._to_device(micro.batch)) for micro in mine]

    def evaluation(self) -> list[tuple[Any, bool]]:
        """This rank's share of the evaluation data, on the device."""
        mine = self.scenario.data.evaluation(self.mesh.dp)[self.mesh.dp_rank]
        return [(self._to_device(batch), counts) for batch, counts in mine]

    def step(self, number: int, outcome: TrainingOutcome) -> None:
        """One step, as the loop does it; what it gave is added to ``outcome``."""
        engine, scenario = self.engine, self.scenario
        if scenario.schedule:
            for name, optimizer in engine.optimizers.items():
                for group, lr in zip(optimizer.param_groups, self.base_lrs[name], strict=True):
                    group["lr"] = lr * scenario.schedule[number]
        total = total_weight(scenario.data.step(number, self.mesh.dp))
        engine.zero_grad()
        report = engine.forward_backward(self.micro_batches(number), total, self.task)
        done = engine.step(scenario.clip, measure_norm=True)
        assert done.grad_norm is not None, "measure_norm=True and no norm came back"
        losses = [float(loss) if weight else None for loss, weight in report.parts]
        by_place = self.comm.all_gather_object((self.mesh.dp_rank, losses))
        outcome.losses.append([dict(by_place)[rank] for rank in range(self.mesh.dp)])
        outcome.norms.append(float(done.grad_norm))
        outcome.skipped.append(done.skipped)

    def evaluate(self, *, averaged: bool) -> dict[str, float]:
        """Means over the evaluation data of all ranks."""
        sums = self.engine.evaluate(self.evaluation(), self.task, averaged=averaged)
        means = {}
        for name in sorted(sums):
            values = [float(sums[name].total), float(sums[name].weight)]
            total, weight = self.comm.reduce_values(values)
            means[name] = total / weight
        return means

    def finish(self, outcome: TrainingOutcome) -> TrainingOutcome:
        """Everything else that training left; then the engine is closed."""
        state = _whole_state(self.engine, self.comm)
        outcome.parameters = state["model"]
        outcome.optimizer = {name: entry["state"] for name, entry in state["optimizer"].items()}
        outcome.loss_scale = state.get("loss_scale", {}).get("scale")
        outcome.metrics = self.evaluate(averaged=False)
        if self.scenario.ema_decay is not None:
            outcome.averaged_metrics = self.evaluate(averaged=True)
        self.engine.close()
        return outcome

    def _to_device(self, batch: Any) -> Any:
        return tree_map(lambda leaf: leaf.to(self.comm.device), batch)
