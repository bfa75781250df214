"""A translation beside its original on the ranks of a test: what each is told, and what it does.

Both start from the same weights and see the same samples. ``run_of`` makes of a plan what a recipe
would be, without composing one; the original is a strategy that a plugin brings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch.distributed.tensor import DTensor, distribute_tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.emulation.knobs import StartKnobs
from torsh_trainer.optim.learning_rates import LearningRateDriver
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.precision import LossScaling, Precision
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch, Strategy
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import Task
from torsh_trainer.testing.state import whole_state
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.recipe import nest
from torsh_trainer.utils import registry
from torsh_trainer.utils.lookup import import_object
from torsh_trainer.verify.subject import LENGTH, VOCABULARY, Subject

SAMPLES, STEPS = 3, 5
EPOCH = 2
"""Steps after which schedules are told that an epoch has ended."""

FP32_BOUND = 1e-6
"""Relative to the largest element: 16 units in the last place."""

UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""The most that a rounding moves a number, relative to it."""
_LEAST = 2.0**-24
"""Between two numbers of fp16 near zero; those of bf16 lie closer."""


@dataclass(frozen=True)
class TrialRun(StartKnobs):
    """What one of the two sides is told. ``infinite_at`` is a step whose loss is infinite."""

    strategy: Strategy
    accumulate: int
    task: Callable[[OptimizerSpec], Task] = Subject
    precision: Precision = Precision()
    clip: Clip = Clip()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: Any = None
    skips: bool = False
    infinite_at: int | None = None

    def job(self, task: Task, build_model: Callable[[], Any], ranks: int) -> Job:
        """The job of an engine on so many ranks."""
        return Job(
            task=task,
            build_model=build_model,
            batch=BatchPlan(SAMPLES * self.accumulate * ranks, SAMPLES, self.accumulate, ranks),
            precision=self.precision,
            clip=self.clip,
            emulation=self.emulation,
            skip_nonfinite=self.skips or self.precision.scales_loss,
        )


class RankTrace(NamedTuple):
    """What a run of one rank came to, by step; ``losses`` by micro-batch in it."""

    losses: list[list[float]]
    norms: list[float]
    scales: list[float | None]
    rates: list[float]
    parameters: list[dict[str, torch.Tensor]]
    """Whole, before the first step and after each."""


def run_of(plan: Plan, conf: Path, *, accumulate: int) -> TrialRun:
    """What ``plan`` says, as objects: the options under ``conf`` with its values in them."""
    values = nest(plan.values)

    def node(group: str, default: str) -> dict[str, Any]:
        text = (conf / group / f"{plan.choices.get(group, default)}.yaml").read_text("utf-8")
        made = {**yaml.safe_load(text), **values.get(group, {})}
        made.pop("defaults", None)
        return made

    low, _, how = plan.choices.get("precision", "fp32").partition("_")
    own = dict(values.get("precision", {}))
    scaling = LossScaling(**own.pop("loss_scaling", {}))
    held: Any = low if how == "true" else "fp32"
    computes: Any = low
    trainer = values.get("trainer", {})
    schedule = node("schedule", "constant")
    return TrialRun(
        registry.strategy_class(plan.choices["strategy"])(**values.get("strategy", {})),
        accumulate,
        precision=Precision(params=held, compute=computes, loss_scaling=scaling, **own),
        clip=Clip(trainer.get("max_grad_norm"), trainer.get("max_grad_value")),
        **StartKnobs.among(trainer),
        optimizer=OptimizerSpec.from_config(node("optimizer", "")),
        schedule=import_object(schedule.pop("_target_"), option="schedule")(**schedule),
        skips=trainer.get("on_nonfinite") == "skip",
    )


def micro_batches(step: int, comm: Communicator, accumulate: int) -> list[MicroBatch]:
    """This rank's part of a step: tokens that are the same in every run."""
    found = []
    for k in range(accumulate):
        place = (step * comm.world.size + comm.world.rank) * accumulate + k
        generator = torch.Generator().manual_seed(place)
        tokens = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
        found.append(MicroBatch((tokens[0], tokens[1]), float(SAMPLES), rng_key=place))
    return found


def draw_weights(task: Task) -> Any:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return task.build_model()


def train_curve(comm: Communicator, run: TrialRun) -> RankTrace:
    """``STEPS`` steps, driven as the loop does."""
    task = run.task(run.optimizer)
    losing, factor = task.loss, [1.0]
    if run.infinite_at is not None:
        task.loss = lambda *given: losing(*given) * factor[0]  # type: ignore[method-assign]
    ranks = comm.world.size
    engine = run.strategy.prepare(run.job(task, partial(draw_weights, task), ranks), comm)
    pace = LearningRateDriver(run.schedule, engine.optimizers, total=STEPS)
    curve, updates = RankTrace([], [], [], [], []), 0

    def look() -> None:
        # Buffers are each rank's own until they are shared: not compared.
        names = {name for name, _ in engine.model.named_parameters()}
        state = {n: v for n, v in engine.state_dict()["model"].items() if n in names}
        whole = whole_state(state, comm)
        curve.parameters.append({n: v.detach().double().clone() for n, v in whole.items()})

    look()
    for step in range(STEPS):
        engine.zero_grad()
        pace.before_update(updates)
        factor[0] = float("inf") if step == run.infinite_at else 1.0
        rate = pace.learning_rate
        batches = micro_batches(step, comm, run.accumulate)
        report = engine.forward_backward(batches, float(SAMPLES * run.accumulate * ranks), task)
        outcome = engine.step(run.clip, measure_norm=True)
        assert outcome.grad_norm is not None
        curve.losses.append([float(loss) for loss, _ in report.parts])
        curve.norms.append(float(outcome.grad_norm))
        curve.scales.append(engine.last_step().get("loss_scale"))
        curve.rates.append(engine.last_step().get("lr", rate))
        if not outcome.skipped:
            pace.after_update()
            updates += 1
        if (step + 1) % EPOCH == 0:
            pace.on_epoch()
        look()
    engine.close()
    return curve


def furthest(mine: RankTrace, theirs: RankTrace) -> float:
    """The largest difference of any parameter at any step, relative to its largest element."""
    return max(
        float((one[name] - value).abs().max() / value.abs().max())
        for one, other in zip(mine.parameters, theirs.parameters, strict=True)
        for name, value in other.items()
    )


def loss_apart(mine: RankTrace, theirs: RankTrace) -> float:
    """The largest relative difference of any loss."""
    ours, others = (torch.tensor(c.losses, dtype=torch.double) for c in (mine, theirs))
    return float(((ours - others) / others).abs().max())


# -- step by step, where sums round in another order ----------------------------------------------


class Moved(NamedTuple):
    """One step each from several starts: where it led, and the gradients' sizes."""

    masters: list[dict[str, torch.Tensor]]
    sizes: list[dict[str, torch.Tensor]]
    """|gradient| of micro-batches, summed; the mean over ranks."""


def measure_moves(
    comm: Communicator, run: TrialRun, starts: Sequence[Mapping[str, torch.Tensor]]
) -> Moved:
    """Step k from ``starts[k]``, by the engine; sizes by an engine of this process alone."""
    task = run.task(run.optimizer)
    engine = run.strategy.prepare(run.job(task, task.build_model, comm.world.size), comm)
    single = Single().prepare(
        Job(task, task.build_model, run.job(task, task.build_model, 1).batch, run.precision),
        LocalCommunicator(torch.device("cpu")),
    )
    scale = run.precision.loss_scaling.initial_scale if run.precision.scales_loss else 1.0
    found = Moved([], [])
    for step, start in enumerate(starts):
        batches = micro_batches(step, comm, run.accumulate)
        _put(single, start)
        sizes = {name: torch.zeros(value.shape) for name, value in start.items()}
        for micro in batches:
            single.zero_grad()
            single.forward_backward([micro], float(SAMPLES * run.accumulate), task)
            for name, p in single.model.named_parameters():
                if p.grad is not None:
                    sizes[name] += p.grad.abs() / scale
        for size in sizes.values():
            comm.all_reduce(size)
        found.sizes.append({name: size.double() / comm.world.size for name, size in sizes.items()})
        _put(engine, start)
        engine.zero_grad()
        weight = float(SAMPLES * run.accumulate * comm.world.size)
        engine.forward_backward(batches, weight, task)
        engine.step(run.clip)
        whole = whole_state(engine.state_dict()["model"], comm)
        found.masters.append({name: whole[name].double() for name in start})
    engine.close()
    single.close()
    return found


@torch.no_grad()
def _put(engine: Any, values: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in engine.model.named_parameters():
        value = values[name].float()
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            part = distribute_tensor(value, mesh, placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(value)


def beyond(found: Moved, theirs: RankTrace, *, low: str, roundings: int, lr: float) -> float:
    """The largest difference of any master after a step, as a share of what is allowed.

    Forward and backward of a rank have the same bits on both sides. Each side rounds its sum at
    most ``roundings`` times to ``low``, in whatever order, by a unit of a partial sum, which is no
    larger than the sum of sizes; and the master itself is rounded to fp32.
    """
    unit, shares = UNIT[low], []
    for step, masters in enumerate(found.masters):
        for name, value in masters.items():
            size = found.sizes[step][name] * (1 + roundings * unit)
            low_sum = 2 * roundings * (unit * size + (_LEAST if low == "fp16" else 0.0))
            allowed = lr * low_sum + 2.0**-22 * value.abs() + 1e-30
            apart = (value - theirs.parameters[step + 1][name]).abs()
            shares.append(float((apart / allowed).max()))
    return max(shares)
