"""The loop of a run that trains a LightningModule: reports, saves, signals around Lightning's."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torsh_trainer.callbacks.base import (
    Callback,
    EvaluationReport,
    SaveReport,
    StepReport,
    load_states,
    states_of,
)
from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.course import OwnLoop, Parts, Position, taken_over
from torsh_trainer.errors import ConfigError, Interrupted, ResourceError, TrainingError
from torsh_trainer.signals import Signals, signal_name
from torsh_trainer.stopping import Stop
from torsh_trainer.strategies.base import Clip, StepOutcome
from torsh_trainer.strategies.state import load_groups
from torsh_trainer_lightning.adapter import rejoined
from torsh_trainer_lightning.loop.fit import Host
from torsh_trainer_lightning.loop.hooked import OPTIMIZERS, SAVE, is_hooked
from torsh_trainer_lightning.loop.kept import (
    Entries,
    check_merging,
    entries_of,
    kept,
    merged,
    restored,
)
from torsh_trainer_lightning.loop.loaded import (
    check_processes,
    lightning_state,
    set_restored,
    told_of_load,
)
from torsh_trainer_lightning.loop.order import check_data
from torsh_trainer_lightning.loop.picked import Own, check_weights, weights_at
from torsh_trainer_lightning.loop.saved import Saved, check_savable, saved_state
from torsh_trainer_lightning.loop.stages import Stages

log = logging.getLogger(__name__)


class StoppedError(Exception):
    """A signal ends training; what is due was saved."""


class LightningLoop(OwnLoop, Host):
    """Drives the facade through the stages of a run, and tells the run's callbacks."""

    def __init__(
        self,
        stages: Stages,
        parts: Parts,
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
        self._comm = comm
        self._on_nonfinite = on_nonfinite
        self._allow = allow
        self._own = own
        self._readers = [c for c in parts.callbacks if type(c).on_step is not Callback.on_step]
        self._listeners = [c for c in self._readers if c.every_step]
        self._log_every = parts.cadence.log_every
        self._losses: list[tuple[Tensor, float]] = []  # with what each weighs
        self._carried = (0.0, 0.0)  # the sum of losses no longer in that list, and their weight
        self._stop: Stop | None = None
        self._evaluated = False
        self._evaluated_at = -1
        self._saved_at = self._logged_at = self._reports = 0
        self._began = self._started = time.perf_counter()
        self._since = (self._began, 0, 0)
        self._paused = self._waited = self._fetch_began = self._evaluation_began = 0.0
        self._pending: dict[str, Any] | None = None
        self._replay: dict[str, Any] | None = None
        self._go_from: Mapping[str, Any] | None = None
        self._kept: Entries = []
        self._draws: dict[str, Any] = {}
        self._norms: dict[str, Tensor] = {}  # of the gradients of this batch, by optimizer
        self._stepped_at: float | None = None  # the rate of this batch, where it is reported
        self._picks = stages.after_fit
        stages.facade.tell(self)

    # -- stages ---------------------------------------------------------------------------------

    def fit(self) -> None:
        limits, facade = self._parts.limits, self._facade
        check_savable(self.engine.optimizers, self._parts.cadence)
        self._started = time.perf_counter()
        with Signals() as signals:
            self._stop = Stop(self._comm, limits, signals, self._started)
            try:
                with facade.guarded():
                    self._stages.start("fit", self._restore)
                    if self.wants_stop:
                        facade.should_stop = True
                    self._check_pick()
                    self._check_hooks()
                    self._since = (time.perf_counter(), self.position.samples, self._batches)
                    facade.drive()
                    self._conclude()
                    self._stages.finish()
            except StoppedError:
                self._interrupted()
            if self._stop.signal:
                self._interrupted()

    def evaluate(self, split: str) -> EvaluationReport:
        began = time.perf_counter()
        stage = "evaluate" if split == "eval" else split
        self._pick_weights()
        with self._facade.guarded():
            self._stages.start(stage, None)
            outputs = self._facade.drive()
            self._stages.finish()
        return self._report(split, outputs or [], began)

    def predict(self) -> Iterable[Any]:
        self._pick_weights()
        with self._facade.guarded():
            self._stages.start("predict", None)
            outputs = self._facade.drive()
            self._stages.finish()
        several = bool(outputs) and isinstance(outputs[0], list)
        return [part for loader in outputs for part in loader] if several else list(outputs or [])

    def _pick_weights(self) -> None:
        """The first stage after training takes the weights that it is to have."""
        word, self._picks = self._picks, None
        if word is None:
            return
        if self._facade.checkpoint_callbacks:
            self._stages.take_ckpt(word)
            return
        checkpointer = self._parts.checkpointer
        path = self._own.path(checkpointer, word, self._comm)
        check_weights(lightning_state(checkpointer.plain(path)), str(path))
        loaded = weights_at(checkpointer, path, self.state(template=True))
        state = self.engine.state_template()
        self.engine.load_state_dict({**state, "model": loaded["engine"]["model"]})
        log.info("the %s checkpoint of this run is %s", word, path)

    def _check_pick(self) -> None:
        """Makes sure that there will be checkpoints to take weights from.

        Raises:
            ConfigError: nothing is saved.
        """
        if self._picks and not self._saves and not self._facade.checkpoint_callbacks:
            raise ConfigError(
                f"task.ckpt_path_after_fit={self._picks}, and this run saves nothing",
                fix="set checkpoint.at_end=true or checkpoint.every_epochs, or add a "
                "ModelCheckpoint to task.callbacks",
            )

    # -- what the loops tell (see fit.Host) ------------------------------------------------------

    def before_epochs(self) -> None:
        # What came so far is drawn as at the very start: loaders may make their data at random.
        if self._go_from is None:
            return
        state, self._go_from = self._go_from, None
        own, facade, middle = state["own"], self._facade, state["own"]["batches"] is not None
        data = self._order.facts(facade.accumulate_grad_batches)
        check_data(
            own.get("data", {}), data, middle=middle, step=self.position.step, allow=self._allow
        )
        self._order.go_on(own.get("data", {}))
        connector = facade._logger_connector
        connector._callback_metrics.update(own["callback_metrics"])
        connector._logged_metrics.update(own["logged_metrics"])
        if middle:
            results, reduce = facade.fit_loop.epoch_loop._results, facade.strategy.reduce
            restored(results, self._kept, self._stages.module, reduce)
            connector._first_loop_iter, connector._current_fx = False, "training_step"
        if state["rng"] is not None and (self._order.portable or not middle):
            set_rng_state(state["rng"], self._comm.device)

    def before_iterator(self) -> None:
        if self._order.portable:
            return
        if self._replay is not None:
            set_rng_state(self._replay["at_iterator"], self._comm.device)
        else:
            self._draws["at_iterator"] = rng_state(self._comm.device)

    def before_first_batch(self, fetcher: Any) -> None:
        if self._order.portable:
            return
        replay, self._replay = self._replay, None
        if replay is None:
            self._draws["at_first"] = rng_state(self._comm.device)
            return
        self._draws = {k: v for k, v in replay.items() if k in ("at_iterator", "at_first")}
        set_rng_state(replay["at_first"], self._comm.device)
        # What has a length counts what it gave; the count is that of the whole epoch already.
        source = fetcher if fetcher.length is None else fetcher.iterator
        for _ in range(replay["batches"]):
            next(source)
        set_rng_state(replay["now"], self._comm.device)

    def count(self, batch: Any) -> None:
        with contextlib.suppress(ConfigError):
            self.position.samples += self._order.samples(batch, self._comm.world.size)

    def before_step(self) -> bool:
        due = self._is_due(self._batches + 1)
        if due:
            self._stepped_at = _rate(self._facade.optimizers)  # a scheduler may change it after
        return due

    def after_step(self, name: str, outcome: StepOutcome) -> None:
        self.skipped += outcome.skipped
        if outcome.grad_norm is not None:
            self._norms[name] = outcome.grad_norm

    def _is_due(self, stepped: int) -> bool:
        """Whether a report is due after so many batches that stepped."""
        return stepped % self._log_every == 0 or stepped == 1

    def after_batch(self, loss: Tensor | None) -> None:
        facade, position = self._facade, self.position
        epoch_loop = facade.fit_loop.epoch_loop
        if loss is not None and self._order.weight:
            self._losses.append((loss, self._order.weight))
        stepped = epoch_loop._batches_that_stepped
        if stepped == self._reports:  # in the middle of an accumulation
            return
        self._reports = stepped
        position.step = epoch_loop.global_step
        position.updates = position.step - self.skipped
        due = self._is_due(stepped)
        wants_stop = False
        if due or self._listeners:
            wants_stop = self._tell(self._measured() if due else None)
        self._norms.clear()
        evaluated, self._evaluated = self._evaluated, False
        if evaluated:
            self._evaluated_at = stepped
        every = self._parts.cadence.save_every
        if every is not None and stepped % every == 0:
            self.save()
        self._ask_to_stop(wants_stop, meet=due or evaluated)

    def after_epoch(self) -> None:
        self.position.epoch = self._facade.current_epoch
        every = self._parts.cadence.save_every_epochs
        if every is not None and self.position.epoch % every == 0:
            self.save()

    def before_fetch(self) -> None:
        self._fetch_began = time.perf_counter()

    def after_fetch(self) -> None:
        self._waited += time.perf_counter() - self._fetch_began
        self._order.begin(self._facade.fit_loop.epoch_loop)

    def before_evaluation(self) -> None:
        self._evaluation_began = time.perf_counter()

    def after_evaluation(self, outputs: list[dict[str, Any]]) -> None:
        report = self._report("eval", outputs, self._evaluation_began)
        self._pause(report.wall_s)
        self._evaluated = True
        answers = [callback.on_evaluate(report) for callback in self._parts.callbacks]
        if any(answers):
            self._facade.should_stop = True

    def _ask_to_stop(self, wanted: bool, *, meet: bool) -> None:
        assert self._stop is not None
        if self._stop.now(self._batches, wanted, meet=meet):
            if self._stop.signal:
                self._save_before_the_end()
                raise StoppedError
            self._facade.should_stop = True

    @property
    def _batches(self) -> int:
        return self._facade.fit_loop.epoch_loop._batches_that_stepped

    # -- the end of training ---------------------------------------------------------------------

    def _conclude(self) -> None:
        self.position.epoch = self._facade.current_epoch
        wall_s = time.perf_counter() - self._started - self._paused
        self.samples_per_s = self.position.samples / wall_s if self.position.samples else None
        if self._parts.cadence.save_at_end and self._saved_at < self._batches:
            self.save()
        self._tell_the_rest()
        self._parts.checkpointer.wait()
        assert self._stop is not None
        self._stop.meet(self._batches)

    def _tell_the_rest(self) -> None:
        if self._reports > self._logged_at:
            self._tell(self._measured())

    def _save_before_the_end(self) -> None:
        if self._saves and self._saved_at < self._batches:
            self.save()
        self._tell_the_rest()
        self._parts.checkpointer.wait()

    @property
    def _saves(self) -> bool:
        every = self._parts.cadence
        return every.save_at_end or bool(every.save_every or every.save_every_epochs)

    def _interrupted(self) -> None:
        assert self._stop is not None
        number = self._stop.signal
        raise Interrupted(
            f"stopped by {signal_name(number)} after step {self.position.step}",
            fix="checkpoint.resume=auto in the same run directory goes on from here"
            if self._saves
            else "nothing was saved: checkpoint.at_end is off",
            signal=number,
            step=self.position.step,
        )

    # -- reports --------------------------------------------------------------------------------

    def _tell(self, metrics: Mapping[str, float] | None) -> bool:
        position = self.position
        report = StepReport(position.step, self._facade.current_epoch, position.samples, metrics)
        listeners = self._listeners if metrics is None else self._readers
        answers = [callback.on_step(report) for callback in listeners]
        return any(answers)

    def _measured(self) -> dict[str, float]:
        facade, position, now = self._facade, self.position, time.perf_counter()
        then, samples, steps = self._since
        taken = max(1, self._reports - steps)
        self._since = (now, position.samples, self._reports)
        self._logged_at = self._reports
        rate, self._stepped_at = self._stepped_at, None
        metrics = {
            "loss": self._mean_loss(),
            "lr": _rate(facade.optimizers) if rate is None else rate,
            **self._norm(),
            "samples_per_s": (position.samples - samples) / max(1e-9, now - then),
            "data_wait_s": self._waited / taken,
            "step_s": (now - then) / taken,
            "skipped": float(position.skipped),
        }
        self._waited = 0.0
        connector = facade._logger_connector
        if facade._results is not None and connector._first_loop_iter is not None:
            connector.settle()
        logged = _numbers(connector._logged_metrics)
        return {**{k: v for k, v in logged.items() if k not in metrics}, **metrics}

    def _norm(self) -> dict[str, float]:
        """The norm of the gradients that this batch stepped by, over all optimizers together."""
        if not self._norms:
            return {}
        return {"grad_norm": math.hypot(*map(float, self._norms.values()))}

    def _pause(self, seconds: float) -> None:
        """What was not training does not count in a report's times."""
        then, samples, steps = self._since
        self._since = (then + seconds, samples, steps)
        self._paused += seconds

    def _mean_loss(self) -> float:
        """The mean over batches and ranks since the last report, by what each weighs.

        Raises:
            TrainingError: it is not finite, and that is to stop the run.
        """
        total, count = self._comm.reduce_values(list(self._read_losses()))
        self._carried = (0.0, 0.0)
        if not count:
            return math.nan if self.train_loss is None else self.train_loss
        # Lightning's loss of a batch is divided by the batches that are accumulated.
        mean = total / count * self._facade.accumulate_grad_batches
        if not math.isfinite(mean) and self._on_nonfinite == "stop":
            raise TrainingError(
                f"the loss is not finite ({mean}), up to step {self.position.step}",
                fix="lower the learning rate, set trainer.max_grad_norm, or "
                "trainer.on_nonfinite=skip",
                step=self.position.step,
            )
        self.train_loss = mean
        return mean

    def _read_losses(self) -> tuple[float, float]:
        """This rank's sum of losses since the last report, and their weight; read now."""
        losses, self._losses = self._losses, []
        total, count = self._carried
        for loss, weight in losses:  # one by one: a save in between must not round otherwise
            total += loss.item() * weight
            count += weight
        self._carried = (total, count)
        return self._carried

    def _report(self, split: str, outputs: list[dict[str, Any]], began: float) -> Any:
        """What ``outputs`` of Lightning's evaluation say; rank 0's numbers, on every rank."""
        numbers = _numbers(dict(ChainMap(*(dict(part) for part in outputs))))
        numbers = self._comm.broadcast_object(numbers)
        if split == "eval":
            self.metrics = dict(numbers)
        else:
            self.metrics = {**self.metrics, **{f"{split}_{k}": v for k, v in numbers.items()}}
        wall_s = time.perf_counter() - began
        facade, samples = self._facade, self.position.samples
        step = max(self.position.step, facade.global_step)
        return EvaluationReport(split, step, facade.current_epoch, samples, numbers, wall_s)

    @property
    def gradient_traffic(self) -> dict[str, float | None]:  # type: ignore[override]
        traffic, steps = self.engine.traffic(), max(1, self._reports)
        if traffic is None:
            return {"sent_bytes_per_step": None, "received_bytes_per_step": None}
        return {
            "sent_bytes_per_step": traffic.sent_bytes / steps,
            "received_bytes_per_step": traffic.received_bytes / steps,
        }

    # -- state ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Saves a checkpoint of this moment, of the run's own kind."""
        began = time.perf_counter()
        checkpointer = self._parts.checkpointer
        try:
            checkpointer.wait()
        except ResourceError as error:
            log.warning("%s. It is tried again", error)
        # A checkpoint's metrics are of its own weights, or it has none.
        measured = self.metrics if self._evaluated_at == self._batches else {}
        self.saved = str(checkpointer.save(self.position.step, self.state(), measured))
        self._saved_at = self._batches
        report = SaveReport(self.position.step, self.saved, time.perf_counter() - began)
        self._pause(report.wall_s)
        for callback in self._parts.callbacks:
            callback.on_save(report)

    def state(self, *, template: bool = False) -> dict[str, Any]:
        saved = Saved({}, self._stages.left_out) if template else self._saved()
        engine = self.engine.state_template() if template else self.engine.state_dict()
        if saved.left_out:
            weights = {n: v for n, v in engine["model"].items() if n not in saved.left_out}
            engine = {**engine, "model": weights}
        rank = f"rank_{self._comm.world.rank}"
        return {
            **self._parts.about,
            "engine": engine,
            "position": self.position.as_plain(),
            "loop": {
                "train_loss": self.train_loss,
                "metrics": dict(self.metrics),
                "losses": {rank: list(self._read_losses())},
                "logged": {rank: kept(self._epochs._results)} if self._in_the_middle else {},
            },
            "schedule": {},
            "task": saved.parts,
            "callbacks": states_of(self._parts.callbacks),
            "feed": {rank: dict(self._draws)} if self._draws else {},
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

    def _saved(self) -> Saved:
        batches = self._epochs.batch_progress.current.ready
        return saved_state(
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
        if not (self._saves and is_hooked(facade, SAVE)):
            return
        draws = rng_state(self._comm.device)
        try:
            self._saved()
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
        for total, weight in taken_over(state["loop"].get("losses", {}), self._comm.world):
            self._carried = (self._carried[0] + total, self._carried[1] + weight)
        load_states(self._parts.callbacks, state["callbacks"])
        rank = f"rank_{self._comm.world.rank}"
        if "lightning" not in state["task"]:
            return
        stages = self._stages
        found = told_of_load(
            stages.facade, self._comm, state, trusted=stages.trust_ckpt, trains=stages.trains
        )
        self._pending = {
            "state": found,
            "draws": state["feed"].get(rank),
            "rng": state["rng"].get(rank),
            "logged": state["loop"].get("logged", {}),
            "optimizers": state["engine"]["optimizer"],
        }

    def _load_engine(self, saved: Mapping[str, Any]) -> None:
        """Weights that the hooks of a save have left out stay what they are."""
        if self._stages.left_out:
            held = self.engine.state_dict()["model"]
            own = {name: held[name] for name in self._stages.left_out if name in held}
            saved = {**saved, "model": {**own, **saved["model"]}}
        self.engine.load_state_dict(saved)

    def _take_over(self, logged: Mapping[str, bytes]) -> None:
        """What was logged so far in the epoch, by rank."""
        if not logged:
            return
        module, first, world = self._stages.module, entries_of(logged["rank_0"]), self._comm.world
        if len(logged) > world.size:
            check_merging(first, module)
        parts = [entries_of(data) for data in taken_over(logged, world)]
        self._kept = merged(parts, first, module)

    def _restore(self) -> None:
        """The progress of Lightning's loops, after ``on_fit_start``, as a ``.ckpt`` gives it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        facade, found = self._facade, pending["state"]
        self._regroup(pending["optimizers"])
        if OPTIMIZERS in found:  # a hook has changed them
            facade.strategy.load_optimizer_state_dict(found)
        own, frame = found["torsh_trainer"], facade.fit_loop
        for config, state in zip(facade.lr_scheduler_configs, found["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        frame.load_state_dict(found["loops"]["fit_loop"])
        self._reports = self._logged_at = self._saved_at = self._batches
        set_restored(frame)
        if own["batches"] is not None:
            self._go_on(own, pending)
        self._go_from = {"own": own, "rng": pending["rng"]}

    def _regroup(self, saved: Mapping[str, Any]) -> None:
        """Settings of the optimizers' groups once more: callbacks may have put back older ones."""
        engine, configured = self.engine, self._facade.strategy.configured
        rejoined(configured, engine)
        names = {id(p): name for name, p in engine.model.named_parameters()}
        for name, optimizer in engine.optimizers.items():
            load_groups(optimizer, saved[name]["groups"], names)

    def _go_on(self, own: Mapping[str, Any], pending: Mapping[str, Any]) -> None:
        """In the middle of an epoch, after as many batches, with the same ones to come."""
        frame = self._facade.fit_loop
        order = own.get("order", "lightning")
        if order != self._order.name:
            raise ConfigError(
                f"the checkpoint lies in the middle of an epoch in task.order={order}, and this "
                f"run has task.order={self._order.name}",
                fix=f"set task.order={order}, or go on from the end of an epoch",
            )
        if not self._order.portable:
            check_processes(own, self._comm.world.size)
        frame.goes_on = True
        self._take_over(pending["logged"])
        if not self._order.portable:
            self._replay = {**pending["draws"], "batches": own["batches"], "now": pending["rng"]}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    }


def _rate(optimizers: Any) -> float:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return float(groups[0].get("lr", 0.0)) if groups else 0.0
