"""The trainer's own loop as the program of a run: what it is fed with, and how far it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch.utils.data import IterableDataset

from torsh_trainer.checkpoint.setup import SetupDifference
from torsh_trainer.comm.base import Communicator
from torsh_trainer.data import samples_kept
from torsh_trainer.data.arithmetic import batch_numbers, batch_numbers_on_resume
from torsh_trainer.data.batch import MicroBatch
from torsh_trainer.data.feed import TrainLoader, eval_batches
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sameness import Excerpt, check_same_data
from torsh_trainer.data.sampler import BatchPartition
from torsh_trainer.data.samples_kept import differing_sample, read_excerpt
from torsh_trainer.data.stream import has_length, keeps_state
from torsh_trainer.data.workers import choose_workers
from torsh_trainer.launchers.hardware import cores
from torsh_trainer.optim.learning_rates import LearningRateDriver
from torsh_trainer.strategies.base import BatchPlan, Job, Mesh, Strategy
from torsh_trainer.tasks.base import Task
from torsh_trainer.training import resume
from torsh_trainer.training.loop import Loop
from torsh_trainer.training.program import (
    Position,
    ProgramContext,
    ProgramParts,
    Restored,
    StageFinding,
    TrainingProgramFactory,
)
from torsh_trainer.training.run_spec import RunSpec
from torsh_trainer.training.stages import StageContext
from torsh_trainer.utils import registry


class LoopFactory(TrainingProgramFactory):
    """How a task trains in the trainer's own loop."""

    knows_samples = True

    def __init__(self, context: ProgramContext) -> None:
        self._context = context
        self._spec, self._task, self._mesh = context.spec, context.task, context.mesh
        self._loading = context.spec.loading
        self._saved: Mapping[str, Any] | None = None  # the plain parts that the run goes on from
        self.further_stages = {
            name: partial(self._run_stage, name) for name in registry.STAGES.names()
        }

    def resume_from(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved

    @property
    def _trains(self) -> bool:
        return "fit" in self._spec.stages

    @property
    def _saved_setup(self) -> Mapping[str, Any]:
        """Empty where there is none, or another program or an earlier release wrote it."""
        return (self._saved or {}).get("setup") or {}

    # -- sizes ----------------------------------------------------------------------------------

    @cached_property
    def batch(self) -> BatchPlan:
        return plan_batch(self._spec, self._mesh, saved=self._saved_setup if self._trains else {})

    @cached_property
    def _cut(self) -> BatchPartition:
        batch = self.batch
        return BatchPartition(
            batch.batch_size, batch.micro_batch_size, self._mesh.dp, self._mesh.dp_rank
        )

    @cached_property
    def steps_per_epoch(self) -> int | None:
        size = self._epoch_size
        return None if size is None else -(-size // self.batch.batch_size)

    @property
    def _epoch_size(self) -> int | None:
        """Samples of one epoch; None when the data has no length."""
        dataset = self._task.data.train
        if dataset is None or not has_length(dataset, self._loading):
            return None
        size, batch = len(dataset), self.batch.batch_size
        if self._spec.overfit_batches is not None:
            size = min(size, self._spec.overfit_batches * batch)
        return size // batch * batch if self._loading.drop_last else size

    @property
    def total_steps(self) -> int | None:
        bounds = (self._spec.max_steps, self.last_step_by_epochs)
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def last_step_by_epochs(self) -> int | None:
        size, epochs = self._epoch_size, self._spec.max_epochs
        if epochs is None or self.steps_per_epoch is None or not size:
            return None
        begins = Position() if self._saved is None else Position.of(self._saved["position"])
        epoch, within = divmod(begins.samples, size)
        left_of_epoch = -(-(size - within) // self.batch.batch_size)
        left = left_of_epoch + (epochs - epoch - 1) * self.steps_per_epoch
        return begins.step + max(0, left)

    # -- data -----------------------------------------------------------------------------------

    def check_data(self) -> None:
        spec, comm = self._spec, self._context.comm
        self._loading = choose_workers(
            spec.loading, self._task, comm, cores=cores(), seed=spec.seed
        )
        found = check_same_data(self._task, self._splits, self._loading, comm, seed=spec.seed)
        if "train" in found:
            self._excerpt = found["train"]
        assert self._excerpt, "read before the engine is made, and takes threads and devices"

    @cached_property
    def _excerpt(self) -> Excerpt:
        """Some of the training samples, where a checkpoint is to hold or holds them."""
        spec = self._spec
        resumes = self._saved is not None or spec.checkpoint.resume != "never"
        if self._trains and (spec.checkpoint.saves or resumes):
            return read_excerpt(self._task, self._loading, seed=spec.seed)
        return Excerpt("no dataset")

    @property
    def _splits(self) -> list[str]:
        """The splits that the stages read, training's first."""
        spec, stages = self._spec, self._spec.stages
        during_fit = spec.eval_every is not None or spec.eval_every_epochs is not None
        reads = {
            "train": any(stage not in ("evaluate", "test", "predict") for stage in stages),
            "eval": "evaluate" in stages or (self._trains and during_fit),
            "test": "test" in stages,
            "predict": "predict" in stages,
        }
        return [split for split, is_read in reads.items() if is_read]

    @property
    def has_fixed_shapes(self) -> bool:
        # Torch's own collate stacks no samples of other shapes.
        return self._task.data.collate is None and self.batch.micro_batch_size > 1

    @property
    def loader_processes(self) -> int:
        return self._loading.workers

    def _batches(self, split: str) -> Iterator[tuple[Any, bool]]:
        return eval_batches(
            self._task,
            split,
            self._loading,
            self._cut,
            self._context.groups.data,
            limit=self._spec.eval_batches,
            seed=self._spec.seed,
        )

    @property
    def reads_again(self) -> bool:
        return not isinstance(self._task.data.train, IterableDataset)  # reading moves a stream on

    def read_micro_batch(self, comm: Communicator) -> MicroBatch:
        size = self.batch.micro_batch_size
        loading = replace(self._loading, num_workers=0)
        steps = self._feed(BatchPartition(size, size, 1, 0), loading=loading, comm=comm).steps()
        try:
            return next(steps).micro_batches[0]
        finally:
            steps.close()

    def _feed(
        self,
        cut: BatchPartition,
        position: Position | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        loading: Loading | None = None,
        comm: Communicator | None = None,
    ) -> TrainLoader:
        """The training samples from ``position`` on; None is the beginning.

        ``comm`` is where weights are summed, by default among all parts of a loss.
        """
        position = position or Position()
        return TrainLoader(
            self._task,
            loading or self._loading,
            cut,
            comm or self._context.groups.loss,
            seed=self._spec.seed,
            consumed=position.samples,
            step=position.step,
            overfit_batches=self._spec.overfit_batches,
            state=state,
        )

    # -- checkpoints ----------------------------------------------------------------------------

    def _describe_data(self, saved: Mapping[str, Any]) -> str:
        dataset, samples = self._task.data.train, int(saved["position"]["samples"])
        if not isinstance(dataset, IterableDataset):
            size = self._epoch_size
            epoch, within = divmod(samples, size) if size else (0, samples)
            return f"goes on in epoch {epoch} after {within:,} of {size:,} samples"
        if keeps_state(dataset) and saved["feed"]:
            return "the stream is put back where it was, by its own state"
        return f"the first {samples:,} samples of the stream are read again and passed over"

    def setup_facts(self) -> Mapping[str, Any]:
        spec = self._spec
        return {
            **resume.data_facts(self._task, self._loading, overfit_batches=spec.overfit_batches),
            **resume.batch_facts(self.batch),
            **resume.task_facts(self._task),
            **resume.schedule_facts(spec.schedule),
            "total_steps": self.total_steps,
            samples_kept.NAME: samples_kept.as_plain(self._excerpt),
        }

    def describe_restored(self, saved: Mapping[str, Any], processes: int) -> Restored:
        return Restored((("data", self._describe_data(saved)),))

    def find_other_samples(self, setup: Mapping[str, Any]) -> Sequence[SetupDifference]:
        before = self._saved_setup
        same = ("trainer.seed", "data.samples")  # else that is said, or they may well be others
        saved = before.get(samples_kept.NAME)
        if not saved or any(before.get(name) != setup.get(name) for name in same):
            return []
        number = differing_sample(
            saved, self._excerpt, self._task, self._loading, seed=self._spec.seed
        )
        if number is None:
            return []
        return [SetupDifference(f"sample {number} of data.train is another than it was", "data")]

    @property
    def changes_loaded(self) -> str:
        kind = type(self._task)
        own = kind.load_state_dict is not Task.load_state_dict
        return f"{kind.__name__}.load_state_dict" if own else ""

    # -- the program, and the stages that it alone knows ----------------------------------------

    def make_program(self, parts: ProgramParts) -> Loop:
        spec, context = self._spec, self._context
        return Loop(
            task=self._task,
            engine=parts.engine,
            comm=context.comm,
            groups=context.groups,
            pace=LearningRateDriver(spec.schedule, parts.engine.optimizers, total=self.total_steps),
            clip=parts.job.clip,
            limits=parts.limits,
            cadence=parts.cadence,
            callbacks=parts.callbacks,
            checkpointer=parts.checkpointer,
            make_feed=partial(self._feed, self._cut),
            batches=self._batches,
            averaged=spec.ema_decay is not None,
            on_nonfinite=spec.on_nonfinite,
            about=parts.about,
            membership=context.membership,
        )

    def _run_stage(self, name: str, strategy: Strategy, job: Job) -> StageFinding:
        stage: Callable[[StageContext], StageFinding] = registry.STAGES.load(name)
        context = self._context
        return stage(
            StageContext(
                spec=self._spec,
                task=self._task,
                strategy=strategy,
                job=job,
                comm=context.comm,
                groups=context.groups,
                run_dir=context.run_dir,
                cut=self._cut,
                feed=self._feed,
            )
        )


def plan_batch(spec: RunSpec, mesh: Mesh, *, saved: Mapping[str, Any]) -> BatchPlan:
    """What a step is; ``saved`` is the setup that the run goes on from, or empty.

    Raises:
        ConfigError: batch arithmetic that contradicts itself, or does not divide.
    """
    numbers = batch_numbers(spec.loading, accumulate=spec.accumulate, dp_size=mesh.dp)
    micro_batch_size = saved.get("data.micro_batch_size")
    if micro_batch_size is not None:
        numbers = batch_numbers_on_resume(
            spec.loading,
            accumulate=spec.accumulate,
            dp_size=mesh.dp,
            saved_micro_batch_size=micro_batch_size,
        )
    return BatchPlan(*numbers, mesh.dp)
