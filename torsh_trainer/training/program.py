"""The contract of what a run drives: the trainer's own loop, or one that a task brings.

A ``TrainingProgramFactory`` is made before there is an engine; with the engine, and the other parts
of the run, it makes the ``TrainingProgram`` that the run drives. Processes, engine, run directory,
callbacks, signals, checkpoints and the command line are those of the run, whatever the program.

A task that trains in a way of its own is a ``ProgramTask``. Any other trains in the trainer's loop.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from torsh_trainer.callbacks.base import Callback, EvaluationReport
from torsh_trainer.checkpoint.base import Checkpointer
from torsh_trainer.checkpoint.setup import SetupDifference
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.membership import Membership
from torsh_trainer.data.batch import MicroBatch
from torsh_trainer.environments.world import World
from torsh_trainer.errors import Unsupported
from torsh_trainer.mesh import Groups
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import BatchPlan, Engine, Job, Mesh, Strategy
from torsh_trainer.tasks.base import Task
from torsh_trainer.training.cadence import Cadence
from torsh_trainer.training.run_spec import RunSpec
from torsh_trainer.training.stopping import Limits

T = TypeVar("T")


@dataclass
class Position:
    """How far training is: everything that a resumed run goes on from, in plain numbers."""

    step: int = 0
    updates: int = 0
    samples: int = 0
    epoch: int = 0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Position:
        """The position that a checkpoint has under ``position``."""
        return cls(**{name: int(count) for name, count in saved.items()})

    def as_plain(self) -> dict[str, int]:
        """What a checkpoint has of it."""
        return asdict(self)

    @property
    def skipped(self) -> int:
        return self.step - self.updates


def select_shares(by_rank: Mapping[str, T], world: World) -> list[T]:
    """This rank's share of a checkpoint's parts by rank (``rank_0``, ``rank_1``, ...).

    On as many processes its own part; on fewer, some take over what several had, and on more, some
    have nothing.
    """
    return [
        part
        for name, part in by_rank.items()
        if int(name.removeprefix("rank_")) % world.size == world.rank
    ]


@dataclass(frozen=True)
class ProgramContext:
    """Where a program begins: the knobs of the run, its processes, and its directory.

    ``comm`` are all processes, and ``groups`` those of a meaning. ``task`` is that of ``spec``, its
    learning rate scaled where that was asked for.
    """

    spec: RunSpec
    task: Task
    comm: Communicator
    mesh: Mesh
    groups: Groups
    run_dir: Path
    membership: Membership = field(default_factory=Membership)


@dataclass(frozen=True)
class ComparisonMode:
    """How ``verify`` has a task train that brings its own program (see ``ProgramTask``).

    ``processes`` is whose batches these are: one of fewer processes takes the shares of several,
    a batch of each in turn, and accumulates over them. ``sgd_lr`` asks for plain SGD at that rate
    in the place of the task's own optimizers and schedules; None leaves those.
    """

    processes: int
    sgd_lr: float | None = None


@dataclass(frozen=True)
class ProgramParts:
    """What a run gives to a program.

    ``about`` are parts of a checkpoint that stay as they are: the configuration, the setup.
    """

    engine: Engine
    job: Job
    limits: Limits
    cadence: Cadence
    callbacks: Sequence[Callback]
    checkpointer: Checkpointer
    about: Mapping[str, Any] = field(default_factory=dict)


class StageFinding(Protocol):
    """What a stage of a program's own has found: printed, and kept in result.json as ``name``."""

    name: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""


@dataclass(frozen=True)
class Restored:
    """What a program would take from a checkpoint beside weights and optimizers, in words.

    ``rows`` are a word for what it is and what there is to say, ``inexact`` what makes the rest of
    the run another than it would have been; ``refused`` is why it would not go on, and what to do.
    """

    rows: Sequence[tuple[str, str]] = ()
    inexact: Sequence[str] = ()
    refused: str = ""


class TrainingProgram(abc.ABC):
    """What a run drives: training, evaluation and prediction, and the state of all of it.

    It tells callbacks (``reports.Reports``), saves what is due (``saves.Saves``), and stops on all
    ranks after the same step (``stopping.Stop``).
    """

    position: Position
    metrics: dict[str, float]
    """The last metrics of each split."""

    train_loss: float | None = None
    saved: str | None = None
    """The checkpoint saved last."""

    samples_per_s: float | None = None
    wants_stop: bool = False
    """A callback has had enough before the first step."""

    feed_state: Mapping[str, Any] | None = None
    """What the data of training goes on from beside the position; None: the position alone."""

    @property
    def gradient_traffic(self) -> Mapping[str, float | None]:
        """Bytes of gradients a step on this rank's wire; None where nobody counts."""
        return {}

    @abc.abstractmethod
    def fit(self) -> None:
        """Trains until a limit is reached, then saves and evaluates what is still due.

        Raises:
            TrainingError: the loss is not finite and that is to stop the run.
            Interrupted: a signal asked to stop; a checkpoint is saved first where saving is on.
        """

    @abc.abstractmethod
    def evaluate(self, split: str) -> EvaluationReport:
        """Metrics of a split (eval or test), the same on every rank."""

    @abc.abstractmethod
    def predict(self) -> Iterable[Any]:
        """This rank's predictions, in order."""

    @abc.abstractmethod
    def state(self, *, template: bool = False) -> dict[str, Any]:
        """All that a resumed run needs, with the parts that every state has (see ``Loop.state``);
        ``template`` is for a checkpoint to fill."""

    @abc.abstractmethod
    def load(
        self, state: Mapping[str, Any], *, has_loaded: Callable[[], object] = lambda: None
    ) -> None:
        """Takes what ``state`` gave, filled by a checkpointer.

        ``has_loaded`` is called once the engine has its part, before anything of the user's may
        change that.
        """


class TrainingProgramFactory(abc.ABC):
    """How a task trains, on one process; made before the engine, and says what a step of it is."""

    manual: bool = False
    """Whether the task calls backward and steps itself, within a forward of the model."""

    sized: bool = True
    """False where ``batch`` only stands for sizes that the task's own loaders say."""

    knows_samples: bool = False
    """Whether it tells the engine which samples each forward is of (``Engine.draw_for``)."""

    further_stages: Mapping[str, Callable[[Strategy, Job], StageFinding]] = {}
    """Stages that it knows beside fit, evaluate, test and predict, by their names."""

    @property
    @abc.abstractmethod
    def batch(self) -> BatchPlan:
        """What the engine is told of a step; asked for after ``resume_from``."""

    @property
    def steps_per_epoch(self) -> int | None:
        """None where it is not known before training."""
        return None

    @property
    def total_steps(self) -> int | None:
        """The step at which a fit will end, as far as steps and epochs say."""
        return None

    @property
    def last_step_by_epochs(self) -> int | None:
        """The step at which ``trainer.max_epochs`` end, where it is known."""
        return None

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the batches of all steps have the same shapes, as far as it knows."""
        return False

    @property
    def reads_again(self) -> bool:
        """Whether ``read_micro_batch`` can read beside the run."""
        return False

    @property
    def loader_processes(self) -> int:
        """Processes that read beside each process that trains."""
        return 0

    @property
    def changes_loaded(self) -> str:
        """What of the user's may change the model once the engine has loaded; empty for none."""
        return ""

    def check_data(self) -> None:  # noqa: B027 - optional
        """Makes what the stages read, before there is an engine; called on every rank.

        Raises:
            ConfigError: it is not the same on all ranks.
        """

    @abc.abstractmethod
    def setup_facts(self) -> Mapping[str, Any]:
        """What must be the same for a run to go on exactly, beside what every run compares: plain
        facts under names of ``checkpoint.setup``."""

    @abc.abstractmethod
    def make_program(self, parts: ProgramParts) -> TrainingProgram:
        """The program, ready for its first step."""

    def reads_checkpoint(self, resume: str) -> bool:
        """Whether ``checkpoint.resume`` names what the program itself goes on from: a checkpoint of
        another product, which no checkpointer knows."""
        return False

    def resume_from(self, saved: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """The run goes on from a checkpoint of its own, which ``TrainingProgram.load`` is given:
        ``saved`` are its plain parts. Called before ``batch`` is asked for."""

    def describe_restored(self, saved: Mapping[str, Any], processes: int) -> Restored:
        """What as many processes would take from a checkpoint, whose plain parts are ``saved``."""
        return Restored()

    def find_other_samples(self, setup: Mapping[str, Any]) -> Sequence[SetupDifference]:
        """Whether the training samples are others than those that the checkpoint began with.

        ``setup`` is that of this run; what it goes on from came with ``resume_from``.
        """
        return ()

    def read_micro_batch(self, comm: Communicator) -> MicroBatch:
        """One micro-batch of training as a process by itself, ``comm``, has it, on its device.

        It is read beside the run, which it does not move on; asked for where ``reads_again``.
        """
        raise NotImplementedError

    def set_precision(self, precision: Precision) -> None:  # noqa: B027 - optional
        """What the run computes in, once ``precision.compute=auto`` is settled; before there is an
        engine."""

    def close(self) -> None:  # noqa: B027 - optional
        """The run is over, or has failed."""


class ProgramTask(Task):
    """A task that trains in a program of its own, where the trainer's loop does not do.

    None of ``forward``, ``loss`` and ``evaluate`` is called but by that program.
    """

    brings_program = True

    instead_of: ClassVar[Mapping[str, str]] = {}
    """What to do instead of a stage that only the trainer's own loop knows, by the stage's name."""

    own_order = False
    """Whether the samples of a step, and their number, are the program's own and other ones on
    another number of processes."""

    def plan_program(self, context: ProgramContext) -> TrainingProgramFactory:
        """How this task trains in the run that ``context`` tells of.

        Raises:
            TorshError: a knob of the run means nothing to the program.
        """
        raise NotImplementedError

    def compare_as(self, mode: ComparisonMode) -> ProgramTask:
        """This task as ``verify`` trains it to compare runs.

        It evaluates, saves and tells nothing, and goes on from nothing.

        Raises:
            TorshError: it cannot be compared in that way.
        """
        raise Unsupported(
            f"{type(self).__name__} trains in a loop of its own, and does not say how to compare "
            "two runs of it",
            fix="define compare_as(self, mode) in it: see "
            "torsh_trainer.training.program.ProgramTask",
        )
