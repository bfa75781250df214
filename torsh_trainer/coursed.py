"""A rank whose task brings its own loop (see ``course``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.course import Course, OwnLoop, Parts, Restored, Setting
from torsh_trainer.errors import Unsupported
from torsh_trainer.rank import Origin, Rank, job_with, knob_facts
from torsh_trainer.strategies.base import Job
from torsh_trainer.task import Task
from torsh_trainer.world import World

if TYPE_CHECKING:  # the trainer is what this module is called by
    from torsh_trainer.trainer import Trainer


def rank_class(task: Task) -> type[Rank]:
    """The rank that runs ``task``: in the trainer's loop, or in one that the task brings."""
    return Rank if type(task).course is Task.course else CoursedRank


class CoursedRank(Rank):
    """The parts of a run on one process, where the task brings its own loop."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        _refuse(self.trainer, self.world)
        setting = Setting(self.trainer, self.comm, self.mesh, self.run_dir)
        self.course: Course = self.task.course(setting)

    def _found_origin(self) -> Origin | None:
        if self.course.reads(self.trainer.checkpoint.resume):
            return None
        found = super()._found_origin()
        if found is not None:
            self.course.goes_on(found.plain)
        return found

    @cached_property
    def job(self) -> Job:
        job = job_with(self.trainer, self.task, self.course.batch)
        randomness = job.randomness if self.course.knows_samples else "by_micro_batch"
        return replace(job, manual=self.course.manual, randomness=randomness)

    @cached_property
    def loop(self) -> OwnLoop:  # type: ignore[override]
        return self.course.loop(
            Parts(
                engine=self.engine,
                limits=self.limits,
                cadence=self.cadence,
                callbacks=self.callbacks,
                checkpointer=self.checkpointer,
                about=self.about,
            )
        )

    def _own_setup(self) -> dict[str, Any]:
        return {**knob_facts(self.trainer), **self.course.setup()}

    @property
    def steps_per_epoch(self) -> int | None:
        return self.course.steps_per_epoch

    @property
    def total_steps(self) -> int | None:
        return self.course.total_steps

    @property
    def elsewhere(self) -> str:
        resume = self.trainer.checkpoint.resume
        return resume if self.course.reads(resume) else ""

    def restored(self, saved: Mapping[str, Any]) -> Restored:
        return self.course.restored(saved, self.world.size)

    @property
    def changes_loaded(self) -> str:
        return type(self.task).__name__

    def _info(self) -> RunInfo:
        info = super()._info()
        return info if self.course.sized else replace(info, batch_size=0, micro_batch_size=0)

    def _check_data(self) -> None:
        """The course makes and reads its own data."""

    def _fit(self) -> None:
        self.loop.fit()

    def _outputs(self) -> Iterable[Any]:
        return self.loop.predict()

    def close(self) -> None:
        super().close()
        self.course.close()


def _refuse(trainer: Trainer, world: World) -> None:
    """Refuses what only the trainer's own loop can do."""
    asked = {
        f"trainer.stages=[{stage}]": trainer.task.instead_of.get(stage, "leave it out")
        for stage in trainer.stages
        if stage.startswith("find_")
    }
    if world.elastic:
        option = f"processes that come and go, as {world.source} has started these"
        asked[option] = "leave --min-np and --host-discovery-script out"
    for option, fix in asked.items():
        raise Unsupported(
            f"{type(trainer.task).__name__} trains in a loop of its own, which cannot honour "
            f"{option}",
            fix=fix,
        )
