"""The loop on one rank: steps, and what is due between them.

Values leave the device only when a report is due. Whatever ends a run (a signal, the clock, a
callback) is agreed among all ranks before any of them stops, about once a second.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from torsh_trainer.callbacks.base import Callback, EvaluationReport, load_states, states_of
from torsh_trainer.checkpoint.base import Checkpointer
from torsh_trainer.checkpoint.memory import gather_state
from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.membership import Membership
from torsh_trainer.data.batch import StepWork
from torsh_trainer.data.feed import TrainLoader
from torsh_trainer.mesh import Groups
from torsh_trainer.optim.learning_rates import LearningRateDriver
from torsh_trainer.optim.optimizers import refuse_closure
from torsh_trainer.strategies.base import Clip, Engine
from torsh_trainer.strategies.foreign import foreign_parameters, refuse_trained
from torsh_trainer.strategies.state import local_optimizer
from torsh_trainer.tasks.base import Mean, Task
from torsh_trainer.training.broadcasts import refuse_broadcasts
from torsh_trainer.training.cadence import Cadence
from torsh_trainer.training.loss_meter import LossMeter, read_numbers
from torsh_trainer.training.nonfinite import NonfiniteGuard
from torsh_trainer.training.program import Position, TrainingProgram, select_shares
from torsh_trainer.training.reports import Reports, add_split
from torsh_trainer.training.saves import Saves
from torsh_trainer.training.stopping import Limits, Stop, StoppedError, Watch
from torsh_trainer.training.unsaved import UnsavedNumbers


@dataclass
class Loop(TrainingProgram):
    """Drives an engine through training; ``fit`` once, ``evaluate`` as often as needed.

    ``comm`` are all processes, which stop, save and fail together; ``groups`` those of a meaning.
    ``about`` are parts of a checkpoint that stay as they are: the configuration, the setup.
    """

    task: Task
    engine: Engine
    comm: Communicator
    groups: Groups
    pace: LearningRateDriver
    clip: Clip
    limits: Limits
    cadence: Cadence
    callbacks: Sequence[Callback]
    checkpointer: Checkpointer
    make_feed: Callable[[Position, Mapping[str, Any] | None], TrainLoader]
    batches: Callable[[str], Iterable[tuple[Any, bool]]]
    averaged: bool
    on_nonfinite: Literal["stop", "skip", "continue"]
    about: Mapping[str, Any] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    metrics: dict[str, float] = field(default_factory=dict)
    feed: TrainLoader | None = None
    membership: Membership = field(default_factory=Membership)

    def __post_init__(self) -> None:
        self._losses = LossMeter()
        self._reports = Reports(self.callbacks, self.cadence)
        self._saves = Saves(self.checkpointer, self.cadence, self._reports)
        self._unsaved = UnsavedNumbers(self.task)
        self._guard = NonfiniteGuard(self.on_nonfinite, self.engine, self.comm)
        # An evaluation was due after this step and has not ended: whether the step ends an epoch.
        self._owed: bool | None = None
        self._evaluated_at = self.position.step
        self._foreign: dict[str, Tensor] = {}  # parameters that the engine does not know
        self._next_stop = 0.0  # the next step at which something may be due
        self._keeps = type(self.membership).after_step is not Membership.after_step

    # -- fit ------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Trains until a limit is reached, then saves and evaluates what is still due.

        Raises:
            Unsupported: an optimizer evaluates the loss by itself.
            TrainingError: the loss is not finite and ``on_nonfinite`` is stop.
            Interrupted: a signal asked to stop; a checkpoint is saved first where saving is on.
        """
        for optimizer in self.engine.optimizers.values():
            refuse_closure(type(local_optimizer(optimizer)))
        position, reports = self.position, self._reports
        self.feed = feed = self.make_feed(position, self.feed_state)
        self._foreign = foreign_parameters(self.task, self.engine.model)
        last_step = self.limits.max_steps
        reports.begin(step=position.step, samples=position.samples, last_step=last_step)
        self.membership.keep(position.step, self.snapshot)
        stop = Stop(self.comm, self.limits, started=reports.timer.began)
        with stop.signals, refuse_broadcasts():
            try:
                self._fit(feed, stop)
            except StoppedError:
                assert stop.signal, "only a signal breaks an evaluation off"
            if stop.signal:
                self._interrupt(stop)

    def _fit(self, feed: TrainLoader, stop: Stop) -> None:
        first, position = self.position.step, self.position
        if not self._begin(stop):
            with contextlib.closing(feed.steps()) as steps:
                self._train(steps, stop)
        self.samples_per_s = self._reports.timer.samples_per_s(position.samples)
        if stop.signal:
            return
        if position.step > first:
            self._end_training()
        self._report_rest()
        if self._evaluates and self._evaluated_at < position.step:
            self._evaluate_now("eval", stop)
        self._saves.finish(self.save)
        stop.meet(position.step)

    def _end_training(self) -> None:
        """Saves what is due, and ends on no weights that are not finite."""
        step = self.position.step
        if self._saves.is_owed_at_end(step):
            self.save()
        elif self._saves.step < step:
            self._guard.check_end(step)

    def _begin(self, stop: Stop) -> bool:
        """Does what an interrupted run still owed; true when nothing is left to train."""
        wants_stop = self.wants_stop
        if self._owed is not None:
            wants_stop = self._after_step(ends_epoch=self._owed, stop=stop) or wants_stop
        most = self.limits.max_epochs
        is_over = most is not None and self.position.epoch >= most
        return stop.should_stop(self.position.step, wants_stop, meet=True) or is_over

    def _train(self, steps: Generator[StepWork, None, None], stop: Stop) -> None:
        position, reports, last_step = self.position, self._reports, self.limits.max_steps
        clock, timer = time.perf_counter, reports.timer
        while last_step is None or position.step < last_step:
            began = clock()
            work = next(steps)
            timer.waited_s += clock() - began
            step = position.step + 1
            due = step >= reports.next_step
            norm = self._step(work, measure_norm=due)
            position.epoch = work.epoch
            wants_stop = False
            if due or reports.wants_all:
                metrics = self._measure(norm) if due else None
                wants_stop = reports.tell_step(step, work.epoch, position.samples, metrics)
            if work.ends_epoch:
                position.epoch += 1
                self.pace.on_epoch()
            if work.ends_epoch or step >= self._next_stop:
                wants_stop = self._after_step(ends_epoch=work.ends_epoch, stop=stop) or wants_stop
            if self._keeps:
                self.membership.after_step(step, self.snapshot)
            # Where all ranks have just met anyway, they also agree on what callbacks want.
            if stop.should_stop(step, wants_stop, meet=due or self._evaluated_at == step):
                return
            if work.ends_epoch and position.epoch >= (self.limits.max_epochs or math.inf):
                return

    def _step(self, work: StepWork, *, measure_norm: bool) -> Tensor | None:
        position, engine = self.position, self.engine
        engine.zero_grad()
        report = engine.forward_backward(work.micro_batches, work.weight, self.task)
        if self._foreign:
            refuse_trained(self._foreign)
        if self.pace.follows_updates:
            self.pace.before_update(position.updates)
        outcome = engine.step(self.clip, measure_norm=measure_norm)
        position.step += 1
        position.samples += work.samples
        if outcome.skipped:
            self._guard.count_skipped(position.step)
        else:
            position.updates += 1
            self._guard.skipped_in_a_row = 0
            self._losses.add(report.parts, work.weight)
            if self.pace.remembers:
                self.pace.after_update()
        return outcome.grad_norm

    def _after_step(self, *, ends_epoch: bool, stop: Stop) -> bool:
        """Evaluates and saves what is due; true when a callback asks to stop."""
        step, epoch, every = self.position.step, self.position.epoch, self.cadence
        wants_stop = False
        self._next_stop = every.next_stop(step)
        if self._evaluates and every.evaluates_after(step, epoch if ends_epoch else None):
            self._owed = ends_epoch
            wants_stop = self._evaluate_now("eval", stop)
        self._owed = None
        if every.saves_after(step, epoch if ends_epoch else None):
            self.save()
        elif not self._saves.is_prepared:
            self._saves.prepare(self.state)
        return wants_stop

    @property
    def _evaluates(self) -> bool:
        return self.cadence.evaluates and self.task.data.eval is not None

    def _interrupt(self, stop: Stop) -> None:
        step = self.position.step
        if self._saves.is_owed_at_stop(step):
            self.save()
        self._report_rest()
        self._saves.finish(self.save)  # while signals are caught: a second one must not cut it off
        raise stop.make_error(step, saves=self.cadence.saves)

    # -- reports --------------------------------------------------------------------------------

    def _report_rest(self) -> None:
        """The steps since the last report, where training ends between two.

        After the last save: a run that goes on from there reports when it would have reported.
        """
        at = self.position
        if at.step > self._reports.step:
            self._reports.tell_step(at.step, at.epoch, at.samples, self._measure(None))

    def _measure(self, norm: Tensor | None) -> dict[str, float]:
        """The numbers of a report; the first read since the last one."""
        position = self.position
        loss, *grad_norm = self._settle_losses(*([] if norm is None else [norm]))
        metrics = self._reports.measure(
            step=position.step,
            samples=position.samples,
            loss=loss,
            lr=self.pace.learning_rate,
            skipped=position.skipped,
            grad_norm=grad_norm[0] if grad_norm else None,
            traffic=self.engine.traffic(),
        )
        if not all(map(math.isfinite, grad_norm)):
            self._guard.check_update(position.step)
        return metrics

    def _settle_losses(self, *beside: Tensor) -> list[float]:
        """The mean loss over the global batches since the last report; and ``beside``, read too.

        Raises:
            TrainingError: it is not finite, and that is to stop the run.
        """
        losses = self._losses
        if not losses.weight:  # nothing yet, or every step was skipped
            return [math.nan, *read_numbers(beside)]
        mine, *others = losses.read(*beside)
        mean = self.groups.loss.reduce_values([mine])[0] / losses.weight
        self._guard.check_mean(mean, losses, update=self.position.updates)
        losses.clear()
        self.train_loss = mean
        return [mean, *others]

    @property
    def gradient_traffic(self) -> dict[str, float | None]:
        """Bytes of gradients a step on this rank's wire, in this run; None where nobody counts."""
        return self._reports.average_traffic(self.engine.traffic(), step=self.position.step)

    # -- evaluation and saving ------------------------------------------------------------------

    def _evaluate_now(self, split: str, stop: Stop) -> bool:
        self._check_pending()  # never evaluate what is already broken
        before = rng_state(self.comm.device)
        try:
            report = self.evaluate(split, watch=stop.watch)
        except StoppedError:  # it is run again, and must then draw the same
            set_rng_state(before, self.comm.device)
            raise
        self._evaluated_at = self.position.step
        self.pace.on_evaluate(report.metrics)
        return self._reports.tell_evaluation(report)

    def _check_pending(self) -> None:
        if self._losses.pending:
            self._guard.check_pending(self._losses, update=self.position.updates)

    def evaluate(self, split: str, *, watch: Watch = lambda batches: batches) -> EvaluationReport:
        """Metrics of a split, reduced over all ranks; ``watch`` may end the batches early."""
        began = time.perf_counter()
        batches = watch(self.batches(split))
        with refuse_broadcasts():
            sums = self.engine.evaluate(batches, self.task, averaged=self.averaged)
        means = self.task.summarise(reduce_means(sums, self.groups.loss))
        self.metrics = add_split(self.metrics, split, means)
        position = self.position
        return EvaluationReport(
            split=split,
            step=position.step,
            epoch=position.epoch,
            samples=position.samples,
            metrics=means,
            wall_s=time.perf_counter() - began,
        )

    def predict(self) -> Iterable[Any]:
        """This rank's predictions, in order."""
        return self.engine.predict(self.batches("predict"), self.task, averaged=self.averaged)

    def save(self) -> None:
        """Saves a checkpoint of this moment."""
        step = self.position.step
        # A checkpoint's metrics are of its own weights, or it has none.
        measured = self.metrics if self._evaluated_at == step else {}
        self._collect_losses()
        self._unsaved.tell()
        self._saves.save(step, self._make_checked_state, measured)
        self.saved = self._saves.path

    def _make_checked_state(self) -> dict[str, Any]:
        state = self.state()
        self._guard.check_weights(self.position.step, state["engine"])
        return state

    def _collect_losses(self) -> None:
        """Reads the losses since the last report into one number, which a state can hold."""
        self._check_pending()
        self._losses.collect()

    def state(self, *, template: bool = False) -> dict[str, Any]:
        """All that a resumed run needs; ``template`` is for a checkpoint to fill."""
        engine = self.engine.state_template() if template else self.engine.state_dict()
        position, rank = self.position, f"rank_{self.groups.data.rank}"
        return {
            **self.about,
            "engine": engine,
            "position": position.as_plain(),
            "loop": {
                "evaluated_at": self._evaluated_at,
                "logged_at": self._reports.step,
                "owed": self._owed,
                "pending_weight": self._losses.weight,
                "pending_sum": {rank: self._losses.total},
                "skipped_in_a_row": self._guard.skipped_in_a_row,
                "metrics": {name: float(value) for name, value in self.metrics.items()},
                "train_loss": self.train_loss,
            },
            "schedule": self.pace.state_dict(position.updates),
            "task": self.task.state_dict(),
            "callbacks": states_of(self.callbacks),
            "feed": self.feed_state if self.feed is None else self.feed.state_dict(),
            "rng": {rank: rng_state(self.comm.device)},
        }

    def snapshot(self) -> dict[str, Any]:
        """``state`` of all ranks together, copied to the CPU, to go on from in memory."""
        self._collect_losses()
        return gather_state({**self.state(), "saves": self._saves.as_plain()}, self.comm)

    def load(
        self, state: Mapping[str, Any], *, has_loaded: Callable[[], object] = lambda: None
    ) -> None:
        """Takes what ``state`` gave, filled by a checkpointer, or ``snapshot``.

        ``has_loaded`` is called once the engine has its part.
        """
        self.engine.load_state_dict(state["engine"])
        has_loaded()
        self.position = Position.of(state["position"])
        self.pace.load_state_dict(state["schedule"])
        self.task.load_state_dict(state["task"])
        self.feed_state = state.get("feed", {})
        load_states(self.callbacks, state["callbacks"])
        rng = state["rng"].get(f"rank_{self.groups.data.rank}")
        if rng is not None:
            set_rng_state(rng, self.comm.device)
        self._evaluated_at = self._saves.step = self._reports.step = self.position.step
        if state["loop"]:  # what another program left has none
            self._load_own(state["loop"])
        if "saves" in state:
            self._saves.load(state["saves"])
            self.saved = self._saves.path

    def _load_own(self, state: Mapping[str, Any]) -> None:
        self._evaluated_at = state["evaluated_at"]
        self._reports.step = state["logged_at"]
        self._owed = state["owed"]
        self._guard.skipped_in_a_row = state["skipped_in_a_row"]
        self.metrics = dict(state["metrics"])
        self.train_loss = state["train_loss"]
        self._losses.weight = state["pending_weight"]
        self._losses.total += sum(select_shares(state["pending_sum"], self.groups.data.world))


def reduce_means(sums: Mapping[str, Mean], comm: Communicator) -> dict[str, float]:
    """Means over all ranks from sums of one rank; a metric's weight may be 0 on some ranks."""
    names = (
        sorted(set().union(*comm.all_gather_object(sorted(sums))))
        if comm.size > 1
        else (sorted(sums))
    )
    zero = Mean(0.0, 0.0)
    flat = [float(value) for name in names for value in sums.get(name, zero)]
    totals = comm.reduce_values(flat) if flat else []
    return {
        name: totals[2 * i] / totals[2 * i + 1] if totals[2 * i + 1] else math.nan
        for i, name in enumerate(names)
    }
