"""The contract of a task that trains in its own way: what stands in the place of the loop.

``Task.course`` gives a ``Course`` before there is an engine; with the engine, and the other parts
of the run, the course makes the ``OwnLoop`` that the run drives. Processes, engine, run directory,
callbacks, signals, checkpoints and the command line stay those of every run.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torsh_trainer.callbacks.base import Callback, EvaluationReport
from torsh_trainer.checkpoint.base import Checkpointer
from torsh_trainer.comm.base import Communicator
from torsh_trainer.stopping import Limits
from torsh_trainer.strategies.base import BatchPlan, Engine, Mesh
from torsh_trainer.world import World

if TYPE_CHECKING:  # the trainer is what all of this is called by
    from torsh_trainer.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Cadence:
    """What is due when, in steps or epochs; None is never."""

    log_every: int
    eval_every: int | None = None
    eval_every_epochs: int | None = None
    save_every: int | None = None
    save_every_epochs: int | None = None
    save_at_end: bool = False


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


def taken_over(by_rank: Mapping[str, T], world: World) -> list[T]:
    """What this rank goes on with of a checkpoint's parts by rank (``rank_0``, ``rank_1``, ...).

    On as many processes its own; on fewer, some take over what several had, and on more, some have
    nothing.
    """
    return [
        part
        for name, part in by_rank.items()
        if int(name.removeprefix("rank_")) % world.size == world.rank
    ]


@dataclass(frozen=True)
class Setting:
    """Where a course begins: the knobs of the run, its processes, and its directory."""

    trainer: Trainer
    comm: Communicator
    mesh: Mesh
    run_dir: Path


@dataclass(frozen=True)
class Likened:
    """How ``verify`` has a task train that brings its own loop (see ``Task.likened``).

    ``processes`` is whose batches these are: one of fewer processes takes the shares of several,
    a batch of each in turn, and accumulates over them. ``sgd_lr`` asks for plain SGD at that rate
    in the place of the task's own optimizers and schedules; None leaves those.
    """

    processes: int
    sgd_lr: float | None = None


@dataclass(frozen=True)
class Parts:
    """What a run gives to the loop of a course.

    ``about`` are parts of a checkpoint that stay as they are: the configuration, the setup.
    """

    engine: Engine
    limits: Limits
    cadence: Cadence
    callbacks: Sequence[Callback]
    checkpointer: Checkpointer
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Restored:
    """What a course would take from a checkpoint beside weights and optimizers, in words.

    ``rows`` are a word for what it is and what there is to say, ``inexact`` what makes the rest of
    the run another than it would have been; ``refused`` is why it would not go on, and what to do.
    """

    rows: Sequence[tuple[str, str]] = ()
    inexact: Sequence[str] = ()
    refused: str = ""


class OwnLoop(abc.ABC):
    """What a run drives: training, evaluation and prediction, and the state of all of it.

    It tells callbacks, saves what is due, and stops on all ranks after the same step
    (``stopping.Stop``).
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

    feed_state: Mapping[str, Any] | None
    """What the data of training goes on from beside the position; None: the position alone."""

    gradient_traffic: Mapping[str, float | None]
    """Bytes of gradients a step on this rank's wire; None where nobody counts."""

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


class Course(abc.ABC):
    """How a task trains that brings its own loop; one on each process, made before the engine.

    ``batch`` is what the engine is told of a step, and ``manual`` whether the task calls backward
    and steps itself, within a forward of the model. ``steps_per_epoch`` and ``total_steps`` are
    None where they are not known before training.
    """

    batch: BatchPlan
    manual: bool = False
    sized: bool = True
    """False where ``batch`` only stands for sizes that the task's own loaders say."""

    knows_samples: bool = False
    """Whether its loop tells the engine which samples each forward is of (``Engine.draw_for``)."""

    steps_per_epoch: int | None = None
    total_steps: int | None = None

    @abc.abstractmethod
    def setup(self) -> Mapping[str, Any]:
        """What must be the same for a run to go on exactly, beside what every run compares: plain
        facts under names of ``checkpoint.setup``."""

    @abc.abstractmethod
    def loop(self, parts: Parts) -> OwnLoop:
        """The loop, ready for its first step."""

    def reads(self, resume: str) -> bool:
        """Whether ``checkpoint.resume`` names what the course itself goes on from: a checkpoint of
        another program, which no checkpointer knows."""
        return False

    def restored(self, saved: Mapping[str, Any], processes: int) -> Restored:
        """What as many processes would take from a checkpoint, whose plain parts are ``saved``."""
        return Restored()

    def goes_on(self, saved: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """The run goes on from a checkpoint of its own, which ``OwnLoop.load`` is given: ``saved``
        are its plain parts."""

    def close(self) -> None:  # noqa: B027 - optional
        """The run is over, or has failed."""
