"""One rank of a run: from knobs to a running loop, and what it leaves behind."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.data import IterableDataset

from torsh_trainer import hardware, pretrained, resume
from torsh_trainer.callbacks.base import MainOnly, RunInfo, asks_to_stop
from torsh_trainer.callbacks.summary import summarise
from torsh_trainer.checkpoint.base import Checkpointer
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.fit import Fit
from torsh_trainer.checkpoint.memory import laid
from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.setup import WORDS, Comparison, Difference, compare
from torsh_trainer.checkpoint.store.places import Location, location
from torsh_trainer.comm.base import Communicator
from torsh_trainer.course import Restored
from torsh_trainer.data import samples_kept
from torsh_trainer.data.arithmetic import batch_numbers, resumed_batch_numbers
from torsh_trainer.data.feed import TrainFeed, eval_batches
from torsh_trainer.data.sameness import Excerpt, check_same_data
from torsh_trainer.data.sampler import Cut, mix
from torsh_trainer.data.samples_kept import differing_sample, read_excerpt
from torsh_trainer.data.stream import has_length, keeps_state
from torsh_trainer.errors import ConfigError
from torsh_trainer.finders import BatchSizes, LearningRates, find_batch_size, find_lr
from torsh_trainer.loop import Cadence, Loop, Position
from torsh_trainer.masking import masked
from torsh_trainer.membership import Membership
from torsh_trainer.pace import Pace
from torsh_trainer.resume import Resumption
from torsh_trainer.rundir import RunDir
from torsh_trainer.schedule.base import Schedule
from torsh_trainer.stopping import Limits
from torsh_trainer.strategies.base import BatchPlan, Clip, Engine, Job, Mesh, Strategy
from torsh_trainer.strategies.sync_batchnorm import count_normalised
from torsh_trainer.task import Task, parameter_count
from torsh_trainer.trust import Trust
from torsh_trainer.weights import freeze
from torsh_trainer.world import World

if TYPE_CHECKING:  # the trainer is what this module is called by
    from torsh_trainer.trainer import Trainer

log = logging.getLogger(__name__)
T = TypeVar("T")
SAME = Membership()
"""The same processes from beginning to end."""


class Rank:
    """The parts of a run on one process, each made when it is first needed."""

    def __init__(
        self,
        trainer: Trainer,
        world: World,
        comm: Communicator,
        mesh: Mesh,
        strategy: Strategy,
        run_dir: Path,
        began: float,
        membership: Membership = SAME,
    ) -> None:
        self.trainer = trainer = completed(trainer, strategy, dp_size=mesh.dp)
        self.world = world
        self.comm = comm
        self.mesh = mesh
        self.membership = membership
        self.run_dir = run_dir
        self.task = _scaled(trainer.task, mesh)
        self.callbacks = [
            c for c in trainer.callbacks if world.is_main or not isinstance(c, MainOnly)
        ]
        self.findings: dict[str, Any] = {}
        self._began = began
        self._chosen = strategy
        self._facts: dict[str, Any] = {}  # of the run, in every manifest

    def run(self) -> None:
        self.membership.begin()
        self._check_data()
        if self.trains and self.trainer.checkpoint.saves:
            self.checkpointer.claim()
        self._resume()
        info = self._info()
        answers = [asks_to_stop(c, "on_start", c.on_start(info)) for c in self.callbacks]
        self.loop.wants_stop = any(answers)
        for stage in self.trainer.stages:
            getattr(self, f"_{stage}")()
        self.checkpointer.close()
        result = self.result()
        for callback in self.callbacks:
            callback.on_end(result)

    # -- parts ----------------------------------------------------------------------------------

    @cached_property
    def origin(self) -> Origin | None:
        """The checkpoint that this run goes on from, if any; looked for before anything is made."""
        return self._found_origin()

    def _found_origin(self) -> Origin | None:
        if self.membership.kept is not None:
            return Origin(self.run_dir, self.membership.kept)
        found = self.checkpointer.find(self.trainer.checkpoint.resume)
        return None if found is None else Origin(found, self.checkpointer.plain(found))

    @cached_property
    def job(self) -> Job:
        saved = self.origin.setup if self.origin and self.trains else {}
        return job_of(self.trainer, self.task, self.mesh, saved=saved)

    @cached_property
    def strategy(self) -> Strategy:
        strategy = self._chosen.resolve(self.job, self.comm)
        self._facts["strategy"] = strategy.name
        return strategy

    @cached_property
    def engine(self) -> Engine:
        engine = self.strategy.prepare(self.job, self.comm)
        if self.trains and engine.randomness != self.job.randomness:
            cause = f"strategy={self.strategy.name}"
            if self.trainer.compile:
                cause = f"trainer.compile=true with {dict(self.trainer.compile_options)}"
            log.warning(
                "trainer.randomness=%s: %s draws %s, so a dropout draws other units on other "
                "numbers of processes",
                self.job.randomness,
                cause,
                engine.randomness.replace("_", " "),
            )
        return engine

    @cached_property
    def cut(self) -> Cut:
        batch = self.job.batch
        return Cut(batch.batch_size, batch.micro_batch_size, self.mesh.dp, self.mesh.dp_rank)

    @cached_property
    def checkpointer(self) -> Checkpointer:
        options = self.trainer.checkpoint
        folder: Location = RunDir(self.run_dir).checkpoints
        if options.dir:
            folder = location(options.dir, options.storage_options)
        run = (self.membership.kept or {}).get("saves", {}).get("run")
        return DcpCheckpointer(folder, self.comm, options, facts=self._facts, run=run)

    @property
    def trains(self) -> bool:
        return "fit" in self.trainer.stages

    @cached_property
    def setup(self) -> dict[str, Any]:
        """What must be the same when a run goes on from a checkpoint of this one; for `loop`."""
        place = resume.place_facts(self.comm.device)
        return {
            **self._own_setup(),
            **resume.strategy_facts(self.strategy),
            **resume.optimizer_facts(self.engine.optimizers, self.engine.model),
            **place,
            "trainer.randomness": self.engine.randomness,
            "world_size": self.world.size,
        }

    def _own_setup(self) -> dict[str, Any]:
        """What the knobs, the task and its data say of it."""
        setup = setup_of(self.trainer, self.task, self.job, total_steps=self.total_steps)
        return {**setup, samples_kept.NAME: samples_kept.as_plain(self._excerpt)}

    @cached_property
    def loop(self) -> Loop:
        trainer = self.trainer
        about = self.about  # before it is paced
        return Loop(
            task=self.task,
            engine=self.engine,
            comm=self.comm,
            pace=Pace(trainer.schedule, self.engine.optimizers, total=self.total_steps),
            clip=self.job.clip,
            limits=self.limits,
            cadence=self.cadence,
            callbacks=self.callbacks,
            checkpointer=self.checkpointer,
            batches=self._batches,
            averaged=trainer.ema_decay is not None,
            on_nonfinite=trainer.on_nonfinite,
            about=about,
            membership=self.membership,
        )

    @property
    def about(self) -> dict[str, Any]:
        """Parts of a checkpoint that stay as they are throughout the run."""
        return {"config": resume.plain(masked(self.trainer.config)), "setup": self.setup}

    @property
    def cadence(self) -> Cadence:
        trainer, options = self.trainer, self.trainer.checkpoint
        return Cadence(
            log_every=trainer.log_every,
            eval_every=trainer.eval_every,
            eval_every_epochs=trainer.eval_every_epochs,
            save_every=options.every_steps,
            save_every_epochs=options.every_epochs,
            save_at_end=options.at_end,
        )

    @property
    def limits(self) -> Limits:
        return Limits(self.total_steps, self.trainer.max_epochs, self._time_left_s)

    @property
    def _time_left_s(self) -> float | None:
        most = self.trainer.max_time_s
        return None if most is None else max(0.0, most - self.membership.spent_s)

    @cached_property
    def steps_per_epoch(self) -> int | None:
        size = self.epoch_size
        return None if size is None else -(-size // self.job.batch.batch_size)

    @property
    def epoch_size(self) -> int | None:
        """Samples of one epoch; None when the data has no length."""
        dataset = self.task.data.train
        if dataset is None or not has_length(dataset, self.trainer.loading):
            return None
        size, batch = len(dataset), self.job.batch.batch_size
        if self.trainer.overfit_batches is not None:
            size = min(size, self.trainer.overfit_batches * batch)
        return size // batch * batch if self.trainer.loading.drop_last else size

    @property
    def total_steps(self) -> int | None:
        """The step at which the fit will end, as far as steps and epochs say."""
        trainer = self.trainer
        bounds = [bound for bound in (trainer.max_steps, self._by_epochs) if bound is not None]
        return min(bounds, default=None)

    @property
    def _by_epochs(self) -> int | None:
        """The step at which ``max_epochs`` end, counted from where this run begins."""
        size, epochs = self.epoch_size, self.trainer.max_epochs
        if epochs is None or self.steps_per_epoch is None or not size:
            return None
        begins = self.origin.position if self.origin else Position()
        epoch, within = divmod(begins.samples, size)
        left_of_epoch = -(-(size - within) // self.job.batch.batch_size)
        left = left_of_epoch + (epochs - epoch - 1) * self.steps_per_epoch
        return begins.step + max(0, left)

    def is_over(self, position: Position) -> str:
        """Why nothing is left to train at ``position``, and the knob to raise; empty: some is."""
        trainer, ends = self.trainer, self._by_epochs
        reached = {}
        if trainer.max_steps is not None and position.step >= trainer.max_steps:
            reached["trainer.max_steps"] = trainer.max_steps
        by_epochs = ends is not None and position.step >= ends
        if trainer.max_epochs is not None and (by_epochs or position.epoch >= trainer.max_epochs):
            reached["trainer.max_epochs"] = trainer.max_epochs
        if not reached:
            return ""
        limits = " and ".join(f"{name}={limit}" for name, limit in reached.items())
        return (
            f"nothing is left to train: step {position.step:,} has reached {limits}; "
            f"raise {' and '.join(reached)} to go on"
        )

    def _batches(self, split: str) -> Iterator[tuple[Any, bool]]:
        return eval_batches(
            self.task,
            split,
            self.trainer.loading,
            self.cut,
            self.comm,
            limit=self.trainer.eval_batches,
            seed=self.trainer.seed,
        )

    def _check_data(self) -> None:
        """Makes what the stages read, and refuses what is not the same on all ranks."""
        trainer = self.trainer
        found = check_same_data(
            self.task, self._splits, trainer.loading, self.comm, seed=trainer.seed
        )
        if "train" in found:
            self._excerpt = found["train"]
        assert self._excerpt, "read before the engine is made, and takes threads and devices"

    @cached_property
    def _excerpt(self) -> Excerpt:
        """Some of the training samples, where a checkpoint is to hold or holds them."""
        trainer = self.trainer
        if self.trains and (trainer.checkpoint.saves or self.origin is not None):
            return read_excerpt(self.task, trainer.loading, seed=trainer.seed)
        return Excerpt("no dataset")

    @property
    def _splits(self) -> list[str]:
        """The splits that the stages read, training's first."""
        trainer, stages = self.trainer, self.trainer.stages
        during_fit = trainer.eval_every is not None or trainer.eval_every_epochs is not None
        reads = {
            "train": any(stage in ("fit", "find_lr", "find_batch_size") for stage in stages),
            "eval": "evaluate" in stages or (self.trains and during_fit),
            "test": "test" in stages,
            "predict": "predict" in stages,
        }
        return [split for split, is_read in reads.items() if is_read]

    @property
    def elsewhere(self) -> str:
        """What the run goes on from that is no checkpoint of its own kind; empty for nothing."""
        return ""

    def restored(self, saved: Mapping[str, Any]) -> Restored:
        """What the plain parts of a checkpoint give beside weights and optimizers, in words."""
        return Restored((("data", self._data_words(saved)),))

    def _data_words(self, saved: Mapping[str, Any]) -> str:
        dataset, samples = self.task.data.train, int(saved["position"]["samples"])
        if not isinstance(dataset, IterableDataset):
            size = self.epoch_size
            epoch, within = divmod(samples, size) if size else (0, samples)
            return f"goes on in epoch {epoch} after {within:,} of {size:,} samples"
        if keeps_state(dataset) and saved["feed"]:
            return "the stream is put back where it was, by its own state"
        return f"the first {samples:,} samples of the stream are read again and passed over"

    # -- stages ---------------------------------------------------------------------------------

    def _resume(self) -> None:
        if self.origin is None:
            return
        if self.membership.kept is not None:
            self._go_on(self.origin)
            return
        loop, path = self.loop, self.origin.path
        self.engine.expect(self.origin.plain.get("engine", {}))
        template = loop.state(template=self.trains)
        fit = self.checkpointer.compare(template, path)
        if self.trains and fit.below(resume.OPTIMIZER).unexpected:  # on all ranks alike
            grown = resume.grown(template, fit, self.engine, self.origin.setup, self.setup)
            template = grown or template
            fit = self.checkpointer.compare(template, path)
        resumption = self._compared(fit)
        trust = self._trust(template, resumption.leave)
        loaded = self.checkpointer.load(template, path=path, leave=resumption.leave)
        loaded = resumption.completed(loaded, self.engine.optimizers)
        if trust is None:
            loop.load(loaded)
        else:
            trust.note(loaded)
            loop.load(loaded, has_loaded=trust.check)
            if self.changes_loaded:
                trust.tell_changes(self.changes_loaded)
        if any(one.word == "data" for one in resumption.comparison.allowed):
            loop.feed_state = None  # it is of other data, or of another order of them
        log.info("resumed from %s at step %d", path, loop.position.step)
        if self.trains:
            resume.apply_settings(self.engine, self.origin.setup, self.setup)
            _tell(resumption.comparison)

    def _trust(self, template: Mapping[str, Any], leave: Iterable[Key]) -> Trust | None:
        if not self.trainer.checkpoint.check_loaded:
            return None
        assert self.origin is not None
        path, engine = self.origin.path, self.engine
        return Trust(self.checkpointer, path, self.comm, engine, template, leave=leave)

    @property
    def changes_loaded(self) -> str:
        """What of the user's may change the model once the engine has loaded; empty for none."""
        kind = type(self.task)
        own = kind.load_state_dict is not Task.load_state_dict
        return f"{kind.__name__}.load_state_dict" if own else ""

    def _go_on(self, origin: Origin) -> None:
        """From what the processes of an earlier attempt have kept in memory.

        Raises:
            ConfigError: these processes cannot; what was kept is on disk then, where saving is on.
        """
        before = {name: fact for name, fact in origin.setup.items() if name != "world_size"}
        try:
            comparison = compare(before, self.setup, allow=self.trainer.checkpoint.allow)
            comparison.check(f"kept in memory for {origin.path}")
            template = self.loop.state(template=True)
        except ConfigError as error:  # on all ranks alike: they have the same configuration
            if not (self.trains and self.trainer.checkpoint.saves):
                raise
            raise self._left(origin, error) from error
        self.loop.load(laid(origin.plain, like={"engine": template["engine"]}))
        _tell(comparison)

    def _left(self, origin: Origin, error: ConfigError) -> ConfigError:
        """``error``, once what was kept in memory for this attempt is on disk."""
        state = dict(origin.plain)
        saves, step, loop = state.pop("saves"), origin.position.step, state["loop"]
        path = saves["path"]
        if saves["at"] < step:
            self._facts.setdefault("strategy", self._chosen.name)
            measured = loop["metrics"] if loop["evaluated_at"] == step else {}
            path = str(self.checkpointer.save(step, state, measured))
            self.checkpointer.close()
        return type(error)(
            error.sentence,
            fix=f"{error.fix}; step {step} is in {path}, from which checkpoint.resume=auto goes on "
            "in the same run directory",
            **error.facts,
        )

    def _compared(self, fit: Fit) -> Resumption:
        """What to load; a refusal on any rank is raised on every rank."""
        assert self.origin is not None
        if self.trains:
            allow = self.trainer.checkpoint.allow
            found = resume.for_training(
                self.origin.plain, self.setup, fit, allow=allow, others=self.other_samples()
            )
        else:
            averaged = self.trainer.ema_decay is not None
            found = resume.for_evaluation(fit, averaged=averaged)
        for comparison in self.comm.all_gather_object(found.comparison):
            comparison.check(str(self.origin.path))
        return found

    def other_samples(self) -> list[Difference]:
        """Whether the training samples are others than those that the checkpoint began with."""
        assert self.origin is not None
        before, trainer = self.origin.setup, self.trainer
        same = ("trainer.seed", "data.samples")  # else that is said, or they may well be others
        saved = before.get(samples_kept.NAME)
        if not saved or any(before.get(name) != self.setup.get(name) for name in same):
            return []
        number = differing_sample(
            saved, self._excerpt, self.task, trainer.loading, seed=trainer.seed
        )
        if number is None:
            return []
        return [Difference(f"sample {number} of data.train is another than it was", "data")]

    def _feed(self, cut: Cut, position: Position | None = None) -> TrainFeed:
        state = None if position is None else self.loop.feed_state
        position = position or Position()
        return TrainFeed(
            self.task,
            self.trainer.loading,
            cut,
            self.comm,
            seed=self.trainer.seed,
            consumed=position.samples,
            step=position.step,
            overfit_batches=self.trainer.overfit_batches,
            state=state,
        )

    def _fit(self) -> None:
        over = self.is_over(self.loop.position)
        if over:
            log.warning("%s", over)
        self.loop.fit(self._feed(self.cut, self.loop.position))

    def _evaluate(self) -> None:
        self._evaluate_split("eval")

    def _test(self) -> None:
        self._evaluate_split("test")

    def _evaluate_split(self, split: str) -> None:
        report = self.loop.evaluate(split)
        for callback in self.callbacks:
            callback.on_evaluate(report)

    def _predict(self) -> None:
        mine = [_to_host(output) for output in self._outputs()]
        by_rank = self.comm.all_gather_object(mine)
        if self.world.is_main:
            rounds = max(map(len, by_rank))
            ordered = [part[i] for i in range(rounds) for part in by_rank if i < len(part)]
            torch.save(_joined(ordered), self.run_dir / "predictions.pt")

    def _outputs(self) -> Iterable[Any]:
        averaged = self.trainer.ema_decay is not None
        return self.engine.predict(self._batches("predict"), self.task, averaged=averaged)

    def _find_lr(self) -> None:
        engine = self.strategy.prepare(self.job, self.comm)
        feed = self._feed(self.cut)
        found = find_lr(engine, feed, self.task, self.comm)
        engine.close()
        self._found("lr_finder", found)

    def _find_batch_size(self) -> None:
        def prepare(size: int) -> tuple[Engine, TrainFeed]:
            plan = BatchPlan(size, size, 1, 1)
            job = replace(self.job, batch=plan)
            return self.strategy.prepare(job, self.comm), self._feed(Cut(size, size, 1, 0))

        most = len(self.task.data.train)
        self._found("batch_size_finder", find_batch_size(prepare, self.task, self.comm, most=most))

    def _found(self, name: str, found: LearningRates | BatchSizes) -> None:
        self.findings[name] = found.as_dict()
        if self.world.is_main:
            print(found, flush=True)  # what the stage is for, however little is logged

    # -- what is told ---------------------------------------------------------------------------

    def _info(self) -> RunInfo:
        trainer, batch = self.trainer, self.job.batch
        parameters, trainable = parameter_count(self.engine.model)
        flops = self.task.flops_per_sample(self.engine.model)
        peak = None
        if flops is not None:
            low = trainer.precision.compute != "fp32"
            peak = hardware.peak_flops(self.comm.device, low_precision=low)
        first = self.membership.kept is None
        return RunInfo(
            run_dir=self.run_dir,
            world=self.world,
            strategy=self.strategy.name,
            backend=self.comm.backend,
            precision=trainer.precision.name,
            device=str(self.comm.device),
            batch_size=batch.batch_size,
            micro_batch_size=batch.micro_batch_size,
            accumulate=batch.accumulate,
            normalised=count_normalised(self.engine.model, batch.micro_batch_size, batch.dp_size),
            max_steps=trainer.max_steps,
            steps_per_epoch=self.steps_per_epoch,
            first_step=self.loop.position.step,
            parameters=parameters,
            trainable_parameters=trainable,
            unit=self.task.unit,
            units_per_sample=self.task.units_per_sample,
            flops_per_sample=flops,
            peak_flops=None if peak is None else peak * self.world.size,
            threads=torch.get_num_threads(),
            model_summary=(
                summarise(self.engine.model, layout=self.engine.layout())
                if first and self.world.is_main
                else ""
            ),
            config=masked(trainer.config),
            total_steps=self.total_steps,
            max_time_s=trainer.max_time_s,
            trains=self.trains,
        )

    def result(self) -> dict[str, Any]:
        """The content of result.json."""
        loop, wall_s = self.loop, time.perf_counter() - self._began
        return {
            "strategy": self.strategy.name,
            "comm": self.comm.backend,
            "world_size": self.world.size,
            "precision": self.trainer.precision.name,
            "steps": loop.position.step,
            "updates": loop.position.updates,
            "epochs": loop.position.epoch,
            "samples": loop.position.samples,
            "train_loss": loop.train_loss,
            "metrics": loop.metrics,
            "wall_s": wall_s,
            "samples_per_s": loop.samples_per_s,
            "peak_memory_bytes": hardware.peak_memory_bytes(self.comm.device),
            "checkpoint": loop.saved,
            "run_dir": str(self.run_dir),
            **loop.gradient_traffic,
            **self._changing_buffers,
            **self.membership.findings,
            **self.findings,
        }

    @property
    def _changing_buffers(self) -> dict[str, Any]:
        names = list(self.engine.changing_buffers())
        return {"changing_buffers": names} if names else {}

    def failed(self, error: BaseException) -> None:
        for callback in self.callbacks:
            callback.on_error(error)

    def close(self) -> None:
        if "checkpointer" in self.__dict__:
            self.checkpointer.release()
        if "engine" in self.__dict__:
            self.engine.close()


class Origin(NamedTuple):
    """The checkpoint that a run goes on from, and what it holds beside tensors.

    What was kept in memory has its tensors with it, and the run directory for a path.
    """

    path: Location
    plain: Mapping[str, Any]

    @property
    def setup(self) -> Mapping[str, Any]:
        """Empty where another program, or an earlier release, wrote it."""
        return self.plain.get("setup") or {}

    @property
    def position(self) -> Position:
        return Position.of(self.plain["position"])


def _tell(comparison: Comparison) -> None:
    """What differs from the run that was saved, for the user to read once."""
    for one in comparison.allowed:
        log.warning("%s: allowed, and %s", one.text, WORDS[one.word])
    for text in (*comparison.applied, *comparison.inexact):
        log.info("%s", text)


def _scaled(task: Task, mesh: Mesh) -> Task:
    """The task with its learning rate scaled by the data-parallel size, where asked for."""
    if task.optimizer.lr_scaling == "none":
        return task
    task = copy.copy(task)
    task.optimizer = task.optimizer.scaled(mesh.dp)
    return task


def _check_scaling(trainer: Trainer) -> None:
    scaling = trainer.task.optimizer.lr_scaling
    if scaling != "none" and trainer.loading.batch_size is not None:
        raise ConfigError(
            f"optimizer.lr_scaling={scaling} belongs to a fixed micro-batch: under data.batch_size="
            f"{trainer.loading.batch_size} the number of processes changes no result",
            fix="set data.micro_batch_size and data.batch_size=null, or optimizer.lr_scaling=none",
        )


def setup_of(trainer: Trainer, task: Task, job: Job, *, total_steps: int | None) -> dict[str, Any]:
    """The part of a run's setup that its knobs and data say (see ``checkpoint.setup``)."""
    return {
        **resume.data_facts(task, trainer.loading, overfit_batches=trainer.overfit_batches),
        **resume.batch_facts(job.batch),
        **resume.task_facts(task),
        **resume.schedule_facts(trainer.schedule),
        "total_steps": total_steps,
        **knob_facts(trainer),
    }


def knob_facts(trainer: Trainer) -> dict[str, Any]:
    """The part of a run's setup that its knobs say, whatever it trains."""
    return {
        "trainer.seed": trainer.seed,
        "precision": trainer.precision.name,
        **resume.compression_facts(trainer.compression),
        "trainer.max_grad_norm": trainer.max_grad_norm,
        "trainer.max_grad_value": trainer.max_grad_value,
        "trainer.on_nonfinite": trainer.on_nonfinite,
        "trainer.ema_decay": trainer.ema_decay,
        "trainer.sync_batchnorm": trainer.sync_batchnorm,
        "trainer.compile": trainer.compile,
        "trainer.deterministic": trainer.deterministic,
    }


def completed(trainer: Trainer, strategy: Strategy, *, dp_size: int) -> Trainer:
    """With what the strategy's own configuration brings, where the run says nothing.

    Raises:
        ConfigError: batch sizes of the two do not divide.
    """
    schedule, loading = trainer.schedule, trainer.loading
    silent = schedule is None or (isinstance(schedule, Schedule) and schedule.constant)
    brought = dict(strategy.brings(schedule=None if silent or schedule is None else schedule.name))
    trainer = replace(trainer, schedule=brought.pop("schedule", schedule))
    sizes: dict[str, int | None] = {
        "batch_size": loading.batch_size,
        "micro_batch_size": loading.micro_batch_size,
        "accumulate": trainer.accumulate,
    }
    taken = {}
    for name in sizes:
        # Two of them say it all.
        if sizes[name] is None and name in brought and list(sizes.values()).count(None) > 1:
            sizes[name] = taken[name] = brought[name]
    if not taken:
        return trainer
    batch_size, micro_batch_size, accumulate = sizes.values()
    loading = replace(loading, batch_size=batch_size, micro_batch_size=micro_batch_size)
    try:
        batch_numbers(loading, accumulate=accumulate, dp_size=dp_size)
    except ConfigError as error:
        what = ", ".join(f"{name}={value}" for name, value in taken.items())
        raise ConfigError(
            f"strategy={strategy.name} brings {what} in its configuration: {error.sentence}",
            fix=error.fix,
        ) from error
    return replace(trainer, loading=loading, accumulate=accumulate)


def job_of(trainer: Trainer, task: Task, mesh: Mesh, *, saved: Mapping[str, Any]) -> Job:
    """What a run asks of its engine; ``saved`` is the setup that it goes on from, or empty.

    Raises:
        ConfigError: batch arithmetic that contradicts itself, or does not divide.
    """
    _check_scaling(trainer)
    return job_with(trainer, task, _batch_plan(trainer, mesh, saved=saved))


def _batch_plan(trainer: Trainer, mesh: Mesh, *, saved: Mapping[str, Any]) -> BatchPlan:
    numbers = batch_numbers(trainer.loading, accumulate=trainer.accumulate, dp_size=mesh.dp)
    micro_batch_size = saved.get("data.micro_batch_size")
    if micro_batch_size is not None:
        numbers = resumed_batch_numbers(
            trainer.loading,
            accumulate=trainer.accumulate,
            dp_size=mesh.dp,
            saved_micro_batch_size=micro_batch_size,
        )
    return BatchPlan(*numbers, mesh.dp)


def job_with(trainer: Trainer, task: Task, batch: BatchPlan) -> Job:
    """What a run in steps of ``batch`` asks of its engine."""
    return Job(
        task=task,
        build_model=partial(_build_model, trainer),
        batch=batch,
        precision=trainer.precision,
        compression=trainer.compression,
        clip=Clip(trainer.max_grad_norm, trainer.max_grad_value),
        activation_checkpointing=trainer.activation_checkpointing,
        checkpoint_modules=tuple(trainer.checkpoint_modules),
        compile=dict(trainer.compile_options) if trainer.compile else None,
        ema_decay=trainer.ema_decay,
        skip_nonfinite=trainer.on_nonfinite == "skip",
        sync_batchnorm=trainer.sync_batchnorm,
        max_steps=trainer.max_steps,
        seed=trainer.seed,
        phantom_lr=trainer.phantom_lr,
        phantom_state=trainer.phantom_state,
        deterministic=trainer.deterministic,
        randomness=trainer.randomness,
    )


def _build_model(trainer: Trainer) -> nn.Module:
    """A seeded, pretrained and frozen module on the CPU, the same on every rank."""
    torch.manual_seed(mix(trainer.seed, -1))
    model = trainer.task.build_model()
    if trainer.pretrained is not None:
        report = pretrained.start_from(model, trainer.pretrained, strict=trainer.pretrained_strict)
        log.info("%s", report)
    if trainer.frozen:
        names = freeze(model, trainer.frozen)
        log.info("%d parameters are frozen", len(names))
    return model


def rehearsal(trainer: Trainer) -> Trainer:
    """``fast_dev_run``: one step, one batch of each split, nothing saved."""
    if not trainer.fast_dev_run:
        return trainer
    quiet = replace(
        trainer.checkpoint, every_steps=None, every_epochs=None, at_end=False, resume="never"
    )
    return replace(
        trainer,
        max_steps=1,
        max_epochs=None,
        max_time=None,
        eval_every=None,
        eval_every_epochs=1,
        eval_batches=1,
        log_every=1,
        checkpoint=quiet,
    )


def _to_host(output: Any) -> Any:
    return output.detach().cpu() if isinstance(output, torch.Tensor) else output


def _joined(parts: list[Any]) -> Any:
    if parts and all(isinstance(part, torch.Tensor) for part in parts):
        return torch.cat([part if part.dim() else part[None] for part in parts])
    return [value for part in parts for value in (part if isinstance(part, list) else [part])]
