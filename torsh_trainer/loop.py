"""The loop on one rank: steps, reports, evaluations, saves, and when to stop.

Values leave the device only when a report is due. Whatever ends a run (a signal, the clock, a
callback) is agreed among all ranks before any of them stops, about once a second.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torsh_trainer.broadcasts import refused_broadcasts
from torsh_trainer.callbacks.base import (
    Callback,
    EvaluationReport,
    SaveReport,
    StepReport,
    asks_to_stop,
    load_states,
    states_of,
)
from torsh_trainer.callbacks.base import named_callbacks as named_callbacks
from torsh_trainer.checkpoint.base import Checkpointer
from torsh_trainer.checkpoint.finite import first_nonfinite
from torsh_trainer.checkpoint.memory import gathered
from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.wire import Traffic
from torsh_trainer.course import Cadence as Cadence
from torsh_trainer.course import Position as Position
from torsh_trainer.course import taken_over
from torsh_trainer.data.batch import Step
from torsh_trainer.data.feed import TrainFeed
from torsh_trainer.errors import Interrupted, ResourceError, TrainingError
from torsh_trainer.membership import Membership
from torsh_trainer.optimizers import refuse_closure
from torsh_trainer.pace import Pace
from torsh_trainer.signals import Signals, signal_name
from torsh_trainer.stopping import BrokenOffError, Limits, Stop, Watch
from torsh_trainer.strategies.base import Clip, Engine
from torsh_trainer.strategies.foreign import foreign_parameters, refuse_trained
from torsh_trainer.strategies.state import local_optimizer
from torsh_trainer.task import Mean, Task

log = logging.getLogger(__name__)

SKIPPED_IN_A_ROW = 100
"""So many skipped steps mean that training no longer happens."""


@dataclass
class Loop:
    """Drives an engine through training; ``fit`` once, ``evaluate`` as often as needed.

    ``about`` are parts of a checkpoint that stay as they are: the configuration, the setup.
    ``wants_stop`` says that a callback has had enough before the first step.
    """

    task: Task
    engine: Engine
    comm: Communicator
    pace: Pace
    clip: Clip
    limits: Limits
    cadence: Cadence
    callbacks: Sequence[Callback]
    checkpointer: Checkpointer
    batches: Callable[[str], Iterable[tuple[Any, bool]]]
    averaged: bool
    on_nonfinite: Literal["stop", "skip", "continue"]
    about: Mapping[str, Any] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    metrics: dict[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    saved: str | None = None
    samples_per_s: float | None = None
    feed: TrainFeed | None = None
    feed_state: Mapping[str, Any] | None = None
    wants_stop: bool = False
    membership: Membership = field(default_factory=Membership)

    def __post_init__(self) -> None:
        self._pending: list[tuple[tuple[Tensor, float], ...]] = []
        self._pending_weight = 0.0
        self._pending_sum = 0.0  # of losses times weights, of what ``_pending`` no longer holds
        self._skipped_in_a_row = 0
        # An evaluation was due after this step and has not ended: whether the step ends an epoch.
        self._owed: bool | None = None
        self._evaluated_at = self._saved_at = self._logged_at = self.position.step
        self._readers = [c for c in self.callbacks if type(c).on_step is not Callback.on_step]
        self._listeners = [c for c in self._readers if c.every_step]
        self._prepared = False
        self._first_step = 0  # of this fit
        self._foreign: dict[str, Tensor] = {}  # parameters that the engine does not know
        self._next_due = 0.0  # the next step at which something may be due
        self._since = _Since(time.perf_counter(), self.position.samples, self.position.step)
        self._started = time.perf_counter()

    # -- fit ------------------------------------------------------------------------------------

    def fit(self, feed: TrainFeed) -> None:
        """Trains until a limit is reached, then saves and evaluates what is still due.

        Raises:
            Unsupported: an optimizer evaluates the loss by itself.
            TrainingError: the loss is not finite and ``on_nonfinite`` is stop.
            Interrupted: a signal asked to stop; a checkpoint is saved first where saving is on.
        """
        for optimizer in self.engine.optimizers.values():
            refuse_closure(type(local_optimizer(optimizer)))
        self.feed = feed
        self._first_step = self.position.step
        self._foreign = foreign_parameters(self.task, self.engine.model)
        self._started = time.perf_counter()
        self._since = _Since(self._started, self.position.samples, self.position.step)
        self.membership.keep(self.position.step, self.snapshot)
        with Signals() as signals, refused_broadcasts():
            stop = Stop(self.comm, self.limits, signals, self._started)
            try:
                self._fit(feed, stop)
            except BrokenOffError:
                assert stop.signal, "only a signal breaks an evaluation off"
            if stop.signal:
                self._interrupted(stop.signal)

    def _fit(self, feed: TrainFeed, stop: Stop) -> None:
        before = self.position.samples
        if not self._begin(stop):
            steps = feed.steps()
            try:
                self._train(steps, stop)
            finally:
                steps.close()
        self._rate(self.position.samples - before)
        if stop.signal:
            return
        if self.position.step > self._first_step:
            self._end_training()
        self._tell_the_rest()
        if self._evaluates and self._evaluated_at < self.position.step:
            self._evaluate_now("eval", stop)
        self._end_saving()
        stop.meet(self.position.step)

    def _end_training(self) -> None:
        """Saves what is due, and ends on no weights that are not finite."""
        if self.cadence.save_at_end and self._saved_at < self.position.step:
            self.save()
        elif self._saved_at < self.position.step and self.on_nonfinite != "continue":
            self._check_weights()

    def _begin(self, stop: Stop) -> bool:
        """Does what an interrupted run still owed; true when nothing is left to train."""
        wants_stop = self.wants_stop
        if self._owed is not None:
            wants_stop = self._after_step(ends_epoch=self._owed, stop=stop) or wants_stop
        most = self.limits.max_epochs
        is_over = most is not None and self.position.epoch >= most
        return stop.now(self.position.step, wants_stop, meet=True) or is_over

    def _train(self, steps: Generator[Step, None, None], stop: Stop) -> None:
        position, log_every = self.position, self.cadence.log_every
        last_step = self.limits.max_steps
        clock, since = time.perf_counter, self._since
        while last_step is None or position.step < last_step:
            began = clock()
            work = next(steps)
            since.waited += clock() - began
            step = position.step + 1
            due = step % log_every == 0 or step in (1, last_step)
            norm = self._step(work, measure_norm=due)
            position.epoch = work.epoch
            wants_stop = False
            if due or self._listeners:
                wants_stop = self._tell(self._metrics(norm) if due else None)
            if work.ends_epoch:
                position.epoch += 1
                self.pace.on_epoch()
            if work.ends_epoch or step >= self._next_due:
                wants_stop = self._after_step(ends_epoch=work.ends_epoch, stop=stop) or wants_stop
            self.membership.after_step(step, self.snapshot)
            # Where all ranks have just met anyway, they also agree on what callbacks want.
            if stop.now(step, wants_stop, meet=due or self._evaluated_at == step):
                return
            if work.ends_epoch and position.epoch >= (self.limits.max_epochs or math.inf):
                return

    def _step(self, work: Step, *, measure_norm: bool) -> Tensor | None:
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
            self._count_skipped()
        else:
            position.updates += 1
            self._skipped_in_a_row = 0
            self._pending.append(report.parts)
            self._pending_weight += work.weight
            if self.pace.remembers:
                self.pace.after_update()
        return outcome.grad_norm

    def _count_skipped(self) -> None:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"{SKIPPED_IN_A_ROW} steps in a row had gradients that are not finite, "
                f"up to step {self.position.step}",
                fix="lower optimizer.lr, set trainer.max_grad_norm, or look at the data",
                step=self.position.step,
            )

    def _after_step(self, *, ends_epoch: bool, stop: Stop) -> bool:
        """Evaluates and saves what is due; true when a callback asks to stop."""
        step, epoch, every = self.position.step, self.position.epoch, self.cadence
        wants_stop = False
        self._next_due = min(_next(step, every.eval_every), _next(step, every.save_every))
        if self._evaluates and (
            _due(step, every.eval_every) or (ends_epoch and _due(epoch, every.eval_every_epochs))
        ):
            self._owed = ends_epoch
            wants_stop = self._evaluate_now("eval", stop)
        self._owed = None
        if _due(step, every.save_every) or (ends_epoch and _due(epoch, every.save_every_epochs)):
            self.save()
        elif not self._prepared:
            self._prepare_saves()
        return wants_stop

    @property
    def _evaluates(self) -> bool:
        every = self.cadence
        wanted = every.eval_every is not None or every.eval_every_epochs is not None
        return wanted and self.task.data.eval is not None

    def _interrupted(self, number: int) -> None:
        every = self.cadence
        saving = every.save_at_end or bool(every.save_every or every.save_every_epochs)
        if saving and self._saved_at < self.position.step:
            self.save()
        self._tell_the_rest()
        self._end_saving()  # while signals are caught: a second one must not cut it off
        raise Interrupted(
            f"stopped by {signal_name(number)} after step {self.position.step}",
            fix="checkpoint.resume=auto in the same run directory goes on from here"
            if saving
            else "nothing was saved: checkpoint.at_end is off",
            signal=number,
            step=self.position.step,
        )

    def _rate(self, samples: int) -> None:
        wall_s = time.perf_counter() - self._started - self._since.paused
        self.samples_per_s = samples / wall_s if samples else None

    # -- reports --------------------------------------------------------------------------------

    def _tell_the_rest(self) -> None:
        """The steps since the last report, where training ends between two.

        After the last save: a run that goes on from there reports when it would have reported.
        """
        if self.position.step > self._logged_at:
            self._tell(self._metrics(None))

    def _tell(self, metrics: Mapping[str, float] | None) -> bool:
        position = self.position
        report = StepReport(position.step, position.epoch, position.samples, metrics)
        stop = False
        for callback in self._listeners if metrics is None else self._readers:
            answer = callback.on_step(report)
            if answer:
                stop = asks_to_stop(callback, "on_step", answer)
        return stop

    def _metrics(self, norm: Tensor | None) -> dict[str, float]:
        """The numbers of a report, the same on every rank; the first read since the last one."""
        loss = self._settle_losses()
        position, now, since = self.position, time.perf_counter(), self._since
        steps = max(1, position.step - since.step)
        metrics = {
            "loss": loss,
            "lr": self.pace.learning_rate,
            "grad_norm": math.nan if norm is None else float(norm),
            "samples_per_s": (position.samples - since.samples) / max(1e-9, now - since.time),
            "data_wait_s": since.waited / steps,
            "step_s": (now - since.time) / steps,
            "skipped": float(position.skipped),
            **since.traffic(self.engine.traffic(), steps),
        }
        if norm is None:
            del metrics["grad_norm"]
        elif not math.isfinite(metrics["grad_norm"]):
            self._check_update()
        since.restart(now, position)
        self._logged_at = position.step
        return metrics

    @property
    def gradient_traffic(self) -> dict[str, float | None]:
        """Bytes of gradients a step on this rank's wire, in this run; None where nobody counts."""
        unknown = {"sent_bytes_per_step": None, "received_bytes_per_step": None}
        steps = max(1, self.position.step - self._first_step)
        return {**unknown, **_Since(0.0, 0, 0).traffic(self.engine.traffic(), steps)}

    def _settle_losses(self) -> float:
        """The mean loss over the global batches since the last report.

        Raises:
            TrainingError: it is not finite, and that is to stop the run.
        """
        if not self._pending_weight:  # nothing yet, or every step was skipped
            return math.nan
        total = self.comm.reduce_values([self._summed()])[0]
        mean = total / self._pending_weight
        if not math.isfinite(mean) and self.on_nonfinite == "stop":
            self._stop_on_nonfinite(mean)
        self._pending.clear()
        self._pending_weight = self._pending_sum = 0.0
        self.train_loss = mean
        return mean

    def _summed(self) -> float:
        """This rank's losses times weights since the last report, read now."""
        parts = [part for step_parts in self._pending for part in step_parts]
        # Term by term: Python's own sum() rounds otherwise when a save comes between.
        total = self._pending_sum
        for value, (_, weight) in zip(_read([loss for loss, _ in parts]), parts, strict=True):
            if weight:  # a filler's loss may be 0/0; it weighs nothing
                total += value * weight
        return total

    def _stop_on_nonfinite(self, mean: float) -> None:
        first = self.position.updates - len(self._pending) + 1
        bad = math.inf
        for i, parts in enumerate(self._pending):
            if any(weight and not bool(torch.isfinite(loss)) for loss, weight in parts):
                bad = float(first + i)
                break
        step = self.comm.reduce_values([bad], op="min")[0]
        where = f"at step {int(step)}" if math.isfinite(step) else "in their sum"
        raise TrainingError(
            f"the loss is not finite ({mean}), first {where}",
            fix="lower optimizer.lr, set trainer.max_grad_norm, or trainer.on_nonfinite=skip",
            step=step,
        )

    def _check_weights(self, state: Mapping[str, Any] | None = None) -> None:
        """Finds what a finite loss does not tell: its gradient was not, and the weights are not.

        ``state`` is the engine's of this moment, where it is known. Collective.

        Raises:
            TrainingError: a weight that trains is not finite.
        """
        model = (self.engine.state_dict() if state is None else state)["model"]
        trained = [n for n, p in self.engine.model.named_parameters() if p.requires_grad]
        name = first_nonfinite(model, trained, self.comm)
        if name is None:
            return
        what = f"the weights are not finite after step {self.position.step}, first {name}"
        if self.on_nonfinite == "continue":
            log.warning("%s", what)
            return
        raise TrainingError(
            what,
            fix="lower optimizer.lr, set trainer.max_grad_norm, or trainer.on_nonfinite=skip",
            step=self.position.step,
            parameter=name,
        )

    def _check_update(self) -> None:
        """After a step whose gradients were not finite, unless it was skipped."""
        if self.on_nonfinite == "stop" and not self._skipped_in_a_row:
            self._check_weights()

    # -- evaluation and saving ------------------------------------------------------------------

    def _evaluate_now(self, split: str, stop: Stop) -> bool:
        if self._pending:  # never evaluate or save what is already broken
            self._settle_quietly()
        before = rng_state(self.comm.device)
        try:
            report = self.evaluate(split, watch=stop.watched)
        except BrokenOffError:  # it is run again, and must then draw the same
            set_rng_state(before, self.comm.device)
            raise
        self._evaluated_at = self.position.step
        self.pace.on_evaluate(report.metrics)
        wants_stop = [
            asks_to_stop(callback, "on_evaluate", callback.on_evaluate(report))
            for callback in self.callbacks
        ]
        self._since.pause(report.wall_s)
        return any(wants_stop)

    def _settle_quietly(self) -> None:
        if self.on_nonfinite == "stop":
            losses = _read([loss for parts in self._pending for loss, _ in parts])
            weights = [weight for parts in self._pending for _, weight in parts]
            broken = any(w and not math.isfinite(v) for v, w in zip(losses, weights, strict=True))
            bad = self.comm.reduce_values([float(broken)])[0]
            if bad:
                self._stop_on_nonfinite(math.nan)

    def evaluate(self, split: str, *, watch: Watch = lambda batches: batches) -> EvaluationReport:
        """Metrics of a split, reduced over all ranks; ``watch`` may end the batches early."""
        began = time.perf_counter()
        batches = watch(self.batches(split))
        with refused_broadcasts():
            sums = self.engine.evaluate(batches, self.task, averaged=self.averaged)
        means = self.task.summarise(reduced(sums, self.comm))
        if split == "eval":
            self.metrics = means
        else:
            self.metrics = {**self.metrics, **{f"{split}_{k}": v for k, v in means.items()}}
        position = self.position
        return EvaluationReport(
            split=split,
            step=position.step,
            epoch=position.epoch,
            samples=position.samples,
            metrics=means,
            wall_s=time.perf_counter() - began,
        )

    def save(self) -> None:
        """Saves a checkpoint of this moment."""
        self._gather_losses()
        began = time.perf_counter()
        self._prepared = True
        failed = self._last_save_failed()
        # A checkpoint's metrics are of its own weights, or it has none.
        measured = self.metrics if self._evaluated_at == self.position.step else {}
        state = self.state()
        self._check_weights(state["engine"])
        path = self.checkpointer.save(self.position.step, state, measured)
        if failed:  # a second failure in a row is not for the next save to find out
            self.checkpointer.wait()
        self._saved_at = self.position.step
        self.saved = str(path)
        report = SaveReport(self.position.step, self.saved, time.perf_counter() - began)
        for callback in self.callbacks:
            callback.on_save(report)
        self._since.pause(report.wall_s)

    def _gather_losses(self) -> None:
        """Reads the losses since the last report into one number, which a state can hold."""
        if self._pending:
            self._settle_quietly()
            self._pending_sum = self._summed()
            self._pending.clear()

    def _last_save_failed(self) -> bool:
        """Waits for a save under way; true when the disk refused it, which may be over by now."""
        try:
            self.checkpointer.wait()
        except ResourceError as error:
            log.warning("%s. It is tried again", error)
            return True
        return False

    def _end_saving(self) -> None:
        """Returns once no save is under way; one that failed is tried once more."""
        if self._last_save_failed():
            self.save()
            self.checkpointer.wait()

    def _prepare_saves(self) -> None:
        """Once the optimizer has its state, after the first step: the first save waits less."""
        self._prepared = True
        if self.cadence.save_every is not None or self.cadence.save_every_epochs is not None:
            began = time.perf_counter()
            self.checkpointer.prepare(self.state)
            self._since.pause(time.perf_counter() - began)

    def state(self, *, template: bool = False) -> dict[str, Any]:
        """All that a resumed run needs; ``template`` is for a checkpoint to fill."""
        engine = self.engine.state_template() if template else self.engine.state_dict()
        position, rank = self.position, f"rank_{self.comm.world.rank}"
        return {
            **self.about,
            "engine": engine,
            "position": position.as_plain(),
            "loop": {
                "evaluated_at": self._evaluated_at,
                "logged_at": self._logged_at,
                "owed": self._owed,
                "pending_weight": self._pending_weight,
                "pending_sum": {rank: self._pending_sum},
                "skipped_in_a_row": self._skipped_in_a_row,
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
        self._gather_losses()
        saves = {"at": self._saved_at, "path": self.saved, "run": self.checkpointer.run}
        return gathered({**self.state(), "saves": saves}, self.comm)

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
        rng = state["rng"].get(f"rank_{self.comm.world.rank}")
        if rng is not None:
            set_rng_state(rng, self.comm.device)
        self._evaluated_at = self._saved_at = self._logged_at = self.position.step
        if state["loop"]:  # what another program left has none
            self._load_own(state["loop"])
        if "saves" in state:
            self._saved_at, self.saved = state["saves"]["at"], state["saves"]["path"]

    def _load_own(self, state: Mapping[str, Any]) -> None:
        self._evaluated_at = state["evaluated_at"]
        self._logged_at = state["logged_at"]
        self._owed = state["owed"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self.metrics = dict(state["metrics"])
        self.train_loss = state["train_loss"]
        self._pending_weight = state["pending_weight"]
        self._pending_sum += sum(taken_over(state["pending_sum"], self.comm.world))


def reduced(sums: Mapping[str, Mean], comm: Communicator) -> dict[str, float]:
    """Means over all ranks from sums of one rank; a metric's weight may be 0 on some ranks."""
    names = (
        sorted(set().union(*comm.all_gather_object(sorted(sums))))
        if comm.world.size > 1
        else (sorted(sums))
    )
    zero = Mean(0.0, 0.0)
    flat = [float(value) for name in names for value in sums.get(name, zero)]
    totals = comm.reduce_values(flat) if flat else []
    return {
        name: totals[2 * i] / totals[2 * i + 1] if totals[2 * i + 1] else math.nan
        for i, name in enumerate(names)
    }


def _read(values: list[Tensor]) -> list[float]:
    """The numbers of 0-dim tensors; from an accelerator all at once."""
    if not values:
        return []
    if values[0].device.type == "cpu":
        return [value.item() for value in values]
    numbers: list[float] = torch.stack(values).tolist()
    return numbers


def _next(count: int, every: int | None) -> float:
    return math.inf if every is None else count - count % every + every


def _due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0


class _Since:
    """Clock and counters since the last report, evaluations and saves left out."""

    __slots__ = ("moved", "paused", "samples", "step", "time", "waited")

    def __init__(self, now: float, samples: int, step: int) -> None:
        self.time, self.samples, self.step, self.waited = now, samples, step, 0.0
        self.paused = 0.0
        self.moved = Traffic()

    def traffic(self, total: Traffic | None, steps: int) -> dict[str, float]:
        """Bytes of gradients a step since the last time this was asked."""
        if total is None:
            return {}
        before, self.moved = self.moved, total
        return {
            "sent_bytes_per_step": (total.sent_bytes - before.sent_bytes) / steps,
            "received_bytes_per_step": (total.received_bytes - before.received_bytes) / steps,
        }

    def restart(self, now: float, position: Position) -> None:
        self.time, self.samples, self.step, self.waited = now, position.samples, position.step, 0.0

    def pause(self, seconds: float) -> None:
        self.time += seconds
        self.paused += seconds
