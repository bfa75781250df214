"""The parts of a run on one process: from knobs to a program that is ready to train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torsh_trainer.callbacks.base import RankZeroOnly
from torsh_trainer.checkpoint.base import Checkpointer
from torsh_trainer.checkpoint.store.places import StoragePath, parse_storage_path
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.membership import Membership
from torsh_trainer.environments.world import World
from torsh_trainer.errors import Unsupported
from torsh_trainer.mesh import Groups
from torsh_trainer.optim.precision import Precision
from torsh_trainer.rundir import RunDir
from torsh_trainer.strategies.base import Engine, Job, Mesh, Strategy
from torsh_trainer.training import attention, compilation, numerics, resume
from torsh_trainer.training.cadence import Cadence
from torsh_trainer.training.job import complete, make_job, scale_learning_rate
from torsh_trainer.training.loop_factory import LoopFactory
from torsh_trainer.training.program import (
    Position,
    ProgramContext,
    ProgramParts,
    ProgramTask,
    StageFinding,
    TrainingProgram,
    TrainingProgramFactory,
)
from torsh_trainer.training.run_spec import RunSpec
from torsh_trainer.training.stopping import Limits
from torsh_trainer.utils import registry
from torsh_trainer.utils.masking import mask_tree

log = logging.getLogger(__name__)
SAME = Membership()
"""The same processes from beginning to end."""


class RunParts:
    """The parts of a run on one process, each made when it is first needed.

    ``findings`` are what the run has found out about itself, for result.json; ``notes`` are lines
    of its summary, and ``facts`` what every manifest has of it.
    """

    def __init__(
        self,
        spec: RunSpec,
        world: World,
        comm: Communicator,
        mesh: Mesh,
        strategy: Strategy,
        run_dir: Path,
        membership: Membership = SAME,
    ) -> None:
        self.spec = spec = complete(spec, strategy, dp_size=mesh.dp)
        self.world = world
        self.comm = comm
        self.mesh = mesh
        self.groups = Groups(mesh, comm)
        self.membership = membership
        self.run_dir = run_dir
        self.task = scale_learning_rate(spec, mesh)
        self.callbacks = [
            c for c in spec.callbacks if world.is_rank_zero or not isinstance(c, RankZeroOnly)
        ]
        self.findings: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self.chosen = strategy
        self._factory = _make_factory(
            ProgramContext(spec, self.task, comm, mesh, self.groups, run_dir, membership)
        )

    def check_data(self) -> None:
        """Makes what the stages read, before anything else is made; see the factory's."""
        self._factory.check_data()

    @property
    def further_stages(self) -> Mapping[str, Callable[[Strategy, Job], StageFinding]]:
        """Stages that the program knows beside fit, evaluate, test and predict, by their names."""
        return self._factory.further_stages

    @cached_property
    def origin(self) -> Origin | None:
        """The checkpoint that this run goes on from, if any; looked for before anything is made."""
        if self.membership.kept is not None:
            return Origin(self.run_dir, self.membership.kept)
        if self.elsewhere:
            return None
        found = self.checkpointer.find(self.spec.checkpoint.resume)
        return None if found is None else Origin(found, self.checkpointer.plain(found))

    @property
    def elsewhere(self) -> str:
        """What the run goes on from that is no checkpoint of its own kind; empty for nothing."""
        resume = self.spec.checkpoint.resume
        return resume if self._factory.reads_checkpoint(resume) else ""

    @cached_property
    def factory(self) -> TrainingProgramFactory:
        """How the task trains, from where this run begins."""
        if self.origin is not None:
            self._factory.resume_from(self.origin.plain)
        return self._factory

    @cached_property
    def precision(self) -> Precision:
        """What the run computes in: settled once, when the checkpoint to go on from is known."""
        saved = self.origin.setup.get("precision") if self.origin else None
        return numerics.settle(self.spec.precision, self.comm, saved=saved)

    @cached_property
    def job(self) -> Job:
        precision, factory = self.precision, self.factory
        factory.set_precision(precision)
        job = make_job(self.spec, self.task, factory.batch)
        job = replace(
            job,
            precision=precision,
            groups=self.groups,
            manual=factory.manual,
            randomness=job.randomness if factory.knows_samples else "by_micro_batch",
        )
        return replace(job, compile=dict(self.spec.compile_options)) if self._compiles(job) else job

    def _compiles(self, job: Job) -> bool:
        if self.spec.compile != "auto" or not self.trains:
            return self.spec.compile is True
        begins, total = self.origin.position.step if self.origin else 0, self.factory.total_steps
        settled = compilation.settle(
            self.spec,
            job,
            self.chosen,
            self.factory,
            self.comm,
            saved=self.origin.setup.get("trainer.compile") if self.origin else None,
            steps=None if total is None else total - begins,
        )
        if settled.words:
            self.notes["compile"] = f"auto, {settled.words}"
        if settled.measured is not None:
            self.findings["compile"] = settled.measured.as_dict()
        return settled.compiles

    @cached_property
    def strategy(self) -> Strategy:
        strategy = self.chosen.resolve(self.job, self.groups.data)
        self.facts["strategy"] = strategy.name
        return strategy

    @cached_property
    def engine(self) -> Engine:
        engine = self.strategy.prepare(self.job, self.groups.data)
        if self.trains and engine.randomness != self.job.randomness:
            cause = f"strategy={self.strategy.name}"
            if self.job.compile is not None:
                cause = f"trainer.compile=true with {dict(self.spec.compile_options)}"
            log.warning(
                "trainer.randomness=%s: %s draws %s, so a dropout draws other units on other "
                "numbers of processes",
                self.job.randomness,
                cause,
                engine.randomness.replace("_", " "),
            )
        return engine

    @cached_property
    def checkpointer(self) -> Checkpointer:
        options = self.spec.checkpoint
        folder: StoragePath = RunDir(self.run_dir).checkpoints
        if options.dir:
            folder = parse_storage_path(options.dir, options.storage_options)
        run = (self.membership.kept or {}).get("saves", {}).get("run")
        make: Callable[..., Checkpointer] = registry.CHECKPOINTERS.load(options.backend)
        return make(folder, self.comm, options, facts=self.facts, run=run)

    @property
    def trains(self) -> bool:
        return "fit" in self.spec.stages

    @cached_property
    def setup(self) -> dict[str, Any]:
        """What must be the same when a run goes on from a checkpoint of this one."""
        place = resume.place_facts(self.comm.device)
        return {
            **resume.knob_facts(self.spec),
            **self.factory.setup_facts(),
            "trainer.compile": self.job.compile is not None,
            **resume.strategy_facts(self.strategy),
            **resume.optimizer_facts(self.engine),
            **place,
            "precision": self.precision.name,
            "precision.matmul": numerics.products(self.comm.device),
            "trainer.attention": attention.as_typed(self.spec.attention),
            "trainer.randomness": self.engine.randomness,
            "world_size": self.mesh.dp,
        }

    @cached_property
    def program(self) -> TrainingProgram:
        return self.factory.make_program(
            ProgramParts(
                engine=self.engine,
                job=self.job,
                limits=self.limits,
                cadence=self.cadence,
                callbacks=self.callbacks,
                checkpointer=self.checkpointer,
                about=self.about,
            )
        )

    @property
    def about(self) -> dict[str, Any]:
        """Parts of a checkpoint that stay as they are throughout the run."""
        return {"config": resume.plain(mask_tree(self.spec.config)), "setup": self.setup}

    @property
    def cadence(self) -> Cadence:
        spec, options = self.spec, self.spec.checkpoint
        return Cadence(
            log_every=spec.log_every,
            eval_every=spec.eval_every,
            eval_every_epochs=spec.eval_every_epochs,
            save_every=options.every_steps,
            save_every_epochs=options.every_epochs,
            save_at_end=options.at_end,
        )

    @property
    def limits(self) -> Limits:
        return Limits(self.factory.total_steps, self.spec.max_epochs, self._time_left_s)

    @property
    def _time_left_s(self) -> float | None:
        most = self.spec.max_time_s
        return None if most is None else max(0.0, most - self.membership.spent_s)

    def close(self) -> None:
        if "checkpointer" in self.__dict__:
            self.checkpointer.release()
        if "engine" in self.__dict__:
            self.engine.close()
        self._factory.close()
        self.groups.close()


class Origin(NamedTuple):
    """The checkpoint that a run goes on from, and what it holds beside tensors.

    What was kept in memory has its tensors with it, and the run directory for a path.
    """

    path: StoragePath
    plain: Mapping[str, Any]

    @property
    def setup(self) -> Mapping[str, Any]:
        """Empty where another program, or an earlier release, wrote it."""
        return self.plain.get("setup") or {}

    @property
    def position(self) -> Position:
        return Position.of(self.plain["position"])


def _make_factory(context: ProgramContext) -> TrainingProgramFactory:
    task = context.task
    if not isinstance(task, ProgramTask):
        return LoopFactory(context)
    _check_program(task, context)
    return task.plan_program(context)


def _check_program(task: ProgramTask, context: ProgramContext) -> None:
    """Refuses what only the trainer's own loop can do."""
    world, mesh = context.comm.world, context.mesh
    asked = {
        f"trainer.stages=[{stage}]": task.instead_of.get(stage, "leave it out")
        for stage in context.spec.stages
        if stage.startswith("find_")
    }
    if world.elastic:
        option = f"processes that come and go, as {world.source} has started these"
        asked[option] = "leave --min-np and --host-discovery-script out"
    if not mesh.sees_other_samples:
        option = f"a mesh on which only {mesh.dp} of {mesh.size} processes see other samples"
        asked[option] = "leave mesh out"
    for option, fix in asked.items():
        raise Unsupported(
            f"{type(task).__name__} trains in a loop of its own, which cannot honour {option}",
            fix=fix,
        )
