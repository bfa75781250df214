"""The loop of a run that trains a LightningModule: what is due around the steps of Lightning's."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torsh_trainer.callbacks.base import EvaluationReport, load_states, states_of
from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, TrainingError
from torsh_trainer.strategies.base import Clip, StepOutcome
from torsh_trainer.training.loss_meter import LossMeter
from torsh_trainer.training.program import Position, ProgramParts, TrainingProgram, select_shares
from torsh_trainer.training.reports import Reports, add_split
from torsh_trainer.training.saves import Saves
from torsh_trainer.training.stopping import Stop, StoppedError
from torsh_trainer_lightning.loop.fit import SilentListener
from torsh_trainer_lightning.loop.hooked import SAVE, is_hooked
from torsh_trainer_lightning.loop.kept import pack_results
from torsh_trainer_lightning.loop.picked import Own, StageWeights
from torsh_trainer_lightning.loop.restart import Restart
from torsh_trainer_lightning.loop.saved import Saved, check_savable, collect_state
from torsh_trainer_lightning.loop.stages import Stages

log = logging.getLogger(__name__)


class LightningLoop(TrainingProgram, SilentListener):
    """Drives the facade through the stages of a run, and tells the run's callbacks."""

    def __init__(
        self,
        stages: Stages,
        parts: ProgramParts,
        comm: Communicator,
        *,
        clip: Clip,
        on_nonfinite: str,
        allow: Sequence[str],
        own: Own,
    ) -> None:
        self.position = Position()
        self.metrics = {}
        self.feed_state: Mapping[str, Any] | None = {}
        self.engine = parts.engine
        self.clip = clip
        self.skipped = 0
        self._stages = stages
        self._facade = stages.facade
        self._order = stages.facade.order
        self._parts = parts
        self._cadence = parts.cadence
        self._comm = comm
        self._on_nonfinite = on_nonfinite
        self._losses = LossMeter()
        self._reports = Reports(parts.callbacks, parts.cadence)
        self._saves = Saves(parts.checkpointer, parts.cadence, self._reports)
        self._restart = Restart(stages, parts.engine, comm, allow=allow)
        self._weights = StageWeights(stages, parts.checkpointer, own, comm)
        self._stop: Stop | None = None
        self._evaluated = False
        self._evaluated_at = -1
        self._stepped = 0  # batches, as many as were counted here
        self._next_stop = 0.0  # the next of them at which a save may be due
        self._fetch_began = self._evaluation_began = 0.0
        self._norms: dict[str, Tensor] = {}  # of the gradients of this batch, by optimizer
        self._stepped_at: float | None = None  # the rate of this batch, where it is reported
        stages.facade.tell(self)

    # -- stages ---------------------------------------------------------------------------------

    def fit(self) -> None:
        check_savable(self.engine.optimizers, self._cadence)
        started = time.perf_counter()
        self._stop = stop = Stop(self._comm, self._parts.limits, started=started)
        with stop.signals:
            with contextlib.suppress(StoppedError), self._facade.guard():
                self._stages.start("fit", self._restore)
                if self.wants_stop:
                    self._facade.should_stop = True
                self._weights.check(saves=self._cadence.saves)
                self._check_hooks()
                samples = self.position.samples
                self._reports.begin(step=self._batches, samples=samples, began=started)
                self._facade.drive()
                self._conclude(stop)
                self._stages.finish()
            if stop.signal:
                raise stop.make_error(self.position.step, saves=self._cadence.saves)

    def evaluate(self, split: str) -> EvaluationReport:
        began = time.perf_counter()
        outputs = self._drive("evaluate" if split == "eval" else split)
        return self._report(split, outputs, began)

    def predict(self) -> Iterable[Any]:
        outputs = self._drive("predict")
        several = bool(outputs) and isinstance(outputs[0], list)
        return [part for loader in outputs for part in loader] if several else list(outputs)

    def _drive(self, stage: str) -> Any:
        """What a stage that does not train gives."""
        self._weights.take(self.engine, lambda: self.state(template=True))
        with self._facade.guard():
            self._stages.start(stage, None)
            outputs = self._facade.drive()
            self._stages.finish()
        return outputs or []

    # -- what the loops tell (see fit.Host) ------------------------------------------------------

    def before_epochs(self) -> None:
        self._restart.before_epochs(self.position.step)

    def before_iterator(self) -> None:
        self._restart.before_iterator()

    def before_first_batch(self, fetcher: Any) -> None:
        self._restart.before_first_batch(fetcher)

    def count(self, batch: Any) -> None:
        with contextlib.suppress(ConfigError):
            self.position.samples += self._order.samples(batch, self._comm.world.size)

    def before_step(self) -> bool:
        due = self._batches + 1 >= self._reports.next_step
        if due:
            self._stepped_at = _rate(self._facade.optimizers)  # a scheduler may change it after
        return due

    def after_step(self, name: str, outcome: StepOutcome) -> None:
        self.skipped += outcome.skipped
        if outcome.grad_norm is not None:
            self._norms[name] = outcome.grad_norm

    def after_batch(self, loss: Tensor | None) -> None:
        facade, position, reports = self._facade, self.position, self._reports
        epoch_loop, weight = facade.fit_loop.epoch_loop, self._order.weight
        if loss is not None and weight:
            self._losses.add(((loss, weight),), weight)
        stepped = epoch_loop._batches_that_stepped
        if stepped == self._stepped:  # in the middle of an accumulation
            return
        self._stepped = stepped
        position.step = epoch_loop.global_step
        position.updates = position.step - self.skipped
        due = stepped >= reports.next_step
        wants_stop = False
        if due or reports.wants_all:
            metrics = self._measure() if due else None
            wants_stop = self._tell(metrics)
        self._norms.clear()
        evaluated, self._evaluated = self._evaluated, False
        if evaluated:
            self._evaluated_at = stepped
        if stepped >= self._next_stop:
            self._next_stop = self._cadence.next_stop(stepped)
            if self._cadence.saves_after(stepped):
                self.save()
        self._ask_to_stop(wants_stop, meet=due or evaluated)

    def after_epoch(self) -> None:
        self.position.epoch = self._facade.current_epoch
        if self._cadence.saves_after(epoch=self.position.epoch):
            self.save()

    def before_fetch(self) -> None:
        self._fetch_began = time.perf_counter()

    def after_fetch(self) -> None:
        self._reports.timer.waited_s += time.perf_counter() - self._fetch_began
        self._order.begin(self._facade.fit_loop.epoch_loop)

    def before_evaluation(self) -> None:
        self._evaluation_began = time.perf_counter()

    def after_evaluation(self, outputs: list[dict[str, Any]]) -> None:
        report = self._report("eval", outputs, self._evaluation_began)
        self._evaluated = True
        if self._reports.tell_evaluation(report):
            self._facade.should_stop = True

    def _ask_to_stop(self, wanted: bool, *, meet: bool) -> None:
        assert self._stop is not None
        if self._stop.should_stop(self._batches, wanted, meet=meet):
            if self._stop.signal:
                self._save_before_stop()
                raise StoppedError
            self._facade.should_stop = True

    @property
    def _batches(self) -> int:
        return self._facade.fit_loop.epoch_loop._batches_that_stepped

    # -- the end of training ---------------------------------------------------------------------

    def _conclude(self, stop: Stop) -> None:
        self.position.epoch = self._facade.current_epoch
        self.samples_per_s = self._reports.timer.samples_per_s(self.position.samples)
        if self._saves.is_owed_at_end(self._batches):
            self.save()
        self._report_rest()
        self._saves.finish(self.save)
        stop.meet(self._batches)

    def _save_before_stop(self) -> None:
        if self._saves.is_owed_at_stop(self._batches):
            self.save()
        self._report_rest()
        self._saves.finish(self.save)

    # -- reports --------------------------------------------------------------------------------

    def _report_rest(self) -> None:
        """The batches since the last report, where training ends between two."""
        if self._stepped > self._reports.step:
            self._tell(self._measure())

    def _tell(self, metrics: Mapping[str, float] | None) -> bool:
        position, epoch = self.position, self._facade.current_epoch
        return self._reports.tell_step(position.step, epoch, position.samples, metrics)

    def _measure(self) -> dict[str, float]:
        """The numbers of a report, with what the module has logged."""
        facade, position = self._facade, self.position
        rate, self._stepped_at = self._stepped_at, None
        metrics = self._reports.measure(
            step=self._stepped,
            samples=position.samples,
            loss=self._mean_loss(),
            lr=_rate(facade.optimizers) if rate is None else rate,
            skipped=position.skipped,
            grad_norm=self._norm(),
        )
        connector = facade._logger_connector
        if facade._results is not None and connector._first_loop_iter is not None:
            connector.settle()
        logged = _numbers(connector._logged_metrics)
        return {**{k: v for k, v in logged.items() if k not in metrics}, **metrics}

    def _norm(self) -> float | None:
        """The norm of the gradients that this batch stepped by, over all optimizers together."""
        return math.hypot(*map(float, self._norms.values())) if self._norms else None

    def _mean_loss(self) -> float:
        """The mean over batches and ranks since the last report, by what each weighs.

        Raises:
            TrainingError: it is not finite, and that is to stop the run.
        """
        losses = self._losses
        losses.collect()
        total, weight = self._comm.reduce_values([losses.total, losses.weight])
        losses.clear()
        if not weight:
            return math.nan if self.train_loss is None else self.train_loss
        # Lightning's loss of a batch is divided by the batches that are accumulated.
        mean = total / weight * self._facade.accumulate_grad_batches
        if not math.isfinite(mean) and self._on_nonfinite == "stop":
            raise TrainingError(
                f"the loss is not finite ({mean}), up to step {self.position.step}",
                fix="lower the learning rate, set trainer.max_grad_norm, or "
                "trainer.on_nonfinite=skip",
                step=self.position.step,
            )
        self.train_loss = mean
        return mean

    def _report(self, split: str, outputs: list[dict[str, Any]], began: float) -> EvaluationReport:
        """What ``outputs`` of Lightning's evaluation say; rank 0's numbers, on every rank."""
        numbers = _numbers(dict(ChainMap(*(dict(part) for part in outputs))))
        numbers = self._comm.broadcast_object(numbers)
        self.metrics = add_split(self.metrics, split, numbers)
        wall_s = time.perf_counter() - began
        facade, samples = self._facade, self.position.samples
        step = max(self.position.step, facade.global_step)
        return EvaluationReport(split, step, facade.current_epoch, samples, numbers, wall_s)

    @property
    def gradient_traffic(self) -> dict[str, float | None]:
        return self._reports.average_traffic(self.engine.traffic(), step=self._stepped)

    # -- state ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Saves a checkpoint of this moment, of the run's own kind."""
        # A checkpoint's metrics are of its own weights, or it has none.
        measured = self.metrics if self._evaluated_at == self._batches else {}
        self._saves.save(self.position.step, self.state, measured, counted=self._batches)
        self.saved = self._saves.path

    def state(self, *, template: bool = False) -> dict[str, Any]:
        saved = Saved({}, self._stages.left_out) if template else self._collect_saved()
        engine = self.engine.state_template() if template else self.engine.state_dict()
        if saved.left_out:
            weights = {n: v for n, v in engine["model"].items() if n not in saved.left_out}
            engine = {**engine, "model": weights}
        rank, losses = f"rank_{self._comm.world.rank}", self._losses
        losses.collect()
        return {
            **self._parts.about,
            "engine": engine,
            "position": self.position.as_plain(),
            "loop": {
                "train_loss": self.train_loss,
                "metrics": dict(self.metrics),
                "losses": {rank: [losses.total, losses.weight]},
                "logged": {rank: pack_results(self._epochs._results)}
                if self._in_the_middle
                else {},
            },
            "schedule": {},
            "task": saved.parts,
            "callbacks": states_of(self._parts.callbacks),
            "feed": {rank: dict(self._restart.draws)} if self._restart.draws else {},
            "rng": {rank: rng_state(self._comm.device)},
        }

    @property
    def _epochs(self) -> Any:
        return self._facade.fit_loop.epoch_loop

    @property
    def _in_the_middle(self) -> bool:
        """Whether an epoch has begun, and not ended."""
        epoch: Any = self._facade.fit_loop.epoch_progress.current
        return bool(epoch.processed < epoch.ready)

    def _collect_saved(self) -> Saved:
        batches = self._epochs.batch_progress.current.ready
        return collect_state(
            self._facade,
            self._comm,
            batches=batches if self._in_the_middle else None,
            freed=self._stages.thaw.freed,
            trusted=self._stages.trust_ckpt,
        )

    def _check_hooks(self) -> None:
        """Looks at what checkpoint hooks make of this moment, before anything is trained.

        Raises:
            ConfigError: what could not be saved.
        """
        facade = self._facade
        if not (self._cadence.saves and is_hooked(facade, SAVE)):
            return
        draws = rng_state(self._comm.device)
        try:
            self._collect_saved()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - it may need what training makes
            log.debug("a hook %s fails before training: %s", SAVE, error)
        set_rng_state(draws, self._comm.device)

    def load(
        self, state: Mapping[str, Any], *, has_loaded: Callable[[], object] = lambda: None
    ) -> None:
        self._load_engine(state["engine"])
        has_loaded()
        self.position = Position.of(state["position"])
        self.skipped = self.position.skipped
        self.metrics = dict(state["loop"].get("metrics", {}))
        self.train_loss = state["loop"].get("train_loss")
        for total, weight in select_shares(state["loop"].get("losses", {}), self._comm.world):
            self._losses.total += total
            self._losses.weight += weight
        load_states(self._parts.callbacks, state["callbacks"])
        self._restart.expect(state)

    def _load_engine(self, saved: Mapping[str, Any]) -> None:
        """Weights that the hooks of a save have left out stay what they are."""
        if self._stages.left_out:
            held = self.engine.state_dict()["model"]
            own = {name: held[name] for name in self._stages.left_out if name in held}
            saved = {**saved, "model": {**own, **saved["model"]}}
        self.engine.load_state_dict(saved)

    def _restore(self) -> None:
        if self._restart.restore():
            self._stepped = self._reports.step = self._saves.step = self._batches


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    }


def _rate(optimizers: Any) -> float:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return float(groups[0].get("lr", 0.0)) if groups else 0.0
