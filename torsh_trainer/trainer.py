"""The trainer: what a run is made of, and the verbs that start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from torsh_trainer import environments, registry
from torsh_trainer.callbacks.base import Callback, named_callbacks
from torsh_trainer.callbacks.defaults import with_defaults
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.door.loading import load_weights
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.compression.base import Compression, NoCompression
from torsh_trainer.data.loading import Loading
from torsh_trainer.duration import seconds
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.launchers.inline import Inline
from torsh_trainer.precision import Precision
from torsh_trainer.process import run_rank
from torsh_trainer.randomness import Randomness, check_randomness
from torsh_trainer.rundir import fresh_name
from torsh_trainer.rundir.description import describe, name_of
from torsh_trainer.schedule.base import Schedule, StatefulSchedule
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.task import DataSource, Task
from torsh_trainer.uncalled import refuse_uncalled
from torsh_trainer.world import World

_INLINE = Inline()
Stage = Literal["fit", "evaluate", "test", "predict", "find_lr", "find_batch_size"]


@dataclass(frozen=True)
class Result:
    """What a run came to: ``content`` is result.json, ``model`` the trained module.

    The model stays in the process that trained it; a run in other processes gives None, and its
    weights lie in the checkpoint: ``load_into`` takes them from there.
    """

    content: Mapping[str, Any]
    model: nn.Module | None = None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last metrics of each split."""
        metrics: Mapping[str, float] = self.content["metrics"]
        return metrics

    @property
    def run_dir(self) -> Path:
        """Where the run lies."""
        return Path(self.content["run_dir"])

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint saved last, if any."""
        path: str | None = self.content["checkpoint"]
        return path

    def load_into(self, model: nn.Module, *, ema: bool = False) -> None:
        """Copies the weights of ``checkpoint`` into ``model``, built as ``task.build_model`` does.

        They come whole, whatever strategy saved them; ``ema`` takes the moving average. See
        ``torsh_trainer.load_weights``, which does the same with a path.

        Raises:
            ConfigError: no checkpoint was saved, or it does not fit the model; nothing is changed.
            ResourceError: the checkpoint is damaged or cannot be read.
        """
        if self.checkpoint is None:
            here = "" if self.model is None else ", or take result.model, the trained module"
            raise ConfigError(
                f"the run in {self.run_dir} has saved no checkpoint",
                fix=f"let it save one (CheckpointOptions(at_end=True)){here}",
            )
        load_weights(model, self.checkpoint, ema=ema)

    def __getstate__(self) -> dict[str, Any]:
        return {"content": self.content, "model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything a run is made of.

    The objects come first; the knobs below them are the ``trainer`` group of the configuration
    under the same names. ``strategy`` may be a name (``"fsdp"``). ``run_dir`` None makes
    ``runs/<time>`` under the current directory. ``default_callbacks`` adds what the command line
    has: progress (``Console``), metrics.jsonl (``Jsonl``) and, where it is installed, TensorBoard's
    files; one among ``callbacks`` takes the place of its like. ``config`` is what config.yaml holds
    and trackers are told; an empty one is written from the objects and knobs given here.
    ``command`` is what would start the run again; an empty one is this program's command line.

    Raises:
        ConfigError: a knob is out of range, or two contradict each other.
    """

    task: Task
    strategy: Strategy | str = "auto"
    loading: Loading = Loading()
    schedule: Schedule | StatefulSchedule | None = None
    precision: Precision = Precision()
    compression: Compression = NoCompression()
    comm: CommOptions = CommOptions()
    launcher: Launcher = _INLINE
    checkpoint: CheckpointOptions = CheckpointOptions()
    callbacks: Sequence[Callback] = ()
    default_callbacks: bool = True
    run_dir: Path | str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()
    log_level: str = "info"

    stages: tuple[Stage, ...] = ("fit",)
    max_steps: int | None = None
    max_epochs: int | None = None
    max_time: str | float | None = None
    accumulate: int | None = None
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    log_every: int = 50
    eval_every: int | None = None
    eval_every_epochs: int | None = 1
    eval_batches: int | None = None
    seed: int = 0
    phantom_lr: float | None = None
    phantom_state: bool = True
    randomness: Randomness = "by_sample"
    deterministic: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    on_nonfinite: Literal["stop", "skip", "continue"] = "stop"
    compile: bool = False
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    activation_checkpointing: bool = False
    checkpoint_modules: tuple[str, ...] = ()
    sync_batchnorm: bool = False
    ema_decay: float | None = None
    pretrained: str | None = None
    pretrained_strict: bool = True
    frozen: tuple[str, ...] = ()
    fast_dev_run: bool = False
    overfit_batches: int | None = None
    objective: str | None = None
    objective_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"trainer.{name}={value} is below 1", fix="give 1 or more, or null for none"
                )
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ConfigError(
                f"trainer.ema_decay={self.ema_decay} is not between 0 and 1", fix="0.999 is usual"
            )
        check_randomness(self.randomness)
        refuse_uncalled(self.task, self.callbacks)
        seconds(self.max_time, option="trainer.max_time")
        unknown = set(self.stages) - set(get_args(Stage))
        if unknown or not self.stages:
            raise ConfigError(
                f"trainer.stages={list(self.stages)} names no work that exists",
                fix="choose from " + ", ".join(get_args(Stage)),
            )

    def fit(self, *stages: Stage) -> Result:
        """Runs ``stages`` in their order; none are ``self.stages``, by default the training alone.

        ``fit("fit", "test")`` trains and tests what came of it, in the same processes.

        Raises:
            TorshError: what went wrong and the next move: ConfigError for what was given,
                ResourceError for disk, network or a missing library, TrainingError where training
                fails, Interrupted. A run that fails leaves result.json with the error.
        """
        return replace(self, stages=stages or self.stages).run()

    def evaluate(self, checkpoint: str | os.PathLike[str]) -> Result:
        """Metrics of the eval split under a checkpoint (its path, or a run directory)."""
        return self._with_weights(checkpoint, "evaluate")

    def test(self, checkpoint: str | os.PathLike[str]) -> Result:
        """Metrics of the test split under a checkpoint (its path, or a run directory)."""
        return self._with_weights(checkpoint, "test")

    def predict(self, checkpoint: str | os.PathLike[str]) -> Result:
        """Predictions for the predict split, in ``predictions.pt`` of the run directory.

        In the order of the samples; ``torch.load`` reads them.
        """
        return self._with_weights(checkpoint, "predict")

    def _with_weights(self, checkpoint: str | os.PathLike[str], stage: Stage) -> Result:
        options = replace(self.checkpoint, resume=str(checkpoint))
        return replace(self, checkpoint=options, stages=(stage,)).run()

    def run(self) -> Result:
        """Runs ``stages`` in the processes that the launcher starts: what ``fit`` and others call.

        Where the processes exist already (torchrun, srun, mpirun), this one takes its place among
        them, as the environment says.

        Raises:
            TorshError: see ``fit``.
        """
        self._check_bounded()
        env = dict(os.environ)
        found = environments.detect(env)
        trainer = self._told()
        if self.run_dir is None and found is None:
            trainer = replace(trainer, run_dir=fresh_name(Path("runs")))
        log_dir = None if trainer.run_dir is None else Path(trainer.run_dir) / "logs"
        context = LaunchContext(env=env, found=found, log_dir=log_dir)
        result: Result = trainer.launcher.launch(run_in, trainer, context=context)
        return result

    def _told(self) -> Trainer:
        """With what the command line would have said of it: callbacks, configuration, command."""
        callbacks = with_defaults(self.callbacks) if self.default_callbacks else self.callbacks
        told = replace(self, callbacks=callbacks, command=self.command or _own_command())
        return replace(told, config=self.config or told._description())

    def _description(self) -> dict[str, Any]:
        """What config.yaml has on the command line, as far as the objects tell what they are."""
        named = isinstance(self.strategy, str)
        objects = {name: getattr(self, name) for name in _OBJECTS}
        if named:
            objects["strategy"] = registry.strategy_class(str(self.strategy))()
        knobs = [field.name for field in fields(self) if field.name not in (*_OBJECTS, *_BESIDE)]
        return {
            "trainer": {name: describe(getattr(self, name)) for name in knobs},
            **_describe_task(self.task, self.loading),
            **{name: describe(value) for name, value in objects.items()},
            "callbacks": {name: describe(c) for name, c in named_callbacks(self.callbacks)},
            "log_level": self.log_level,
        }

    def _check_bounded(self) -> None:
        """Makes sure that a training ends.

        Raises:
            ConfigError: nothing says when.
        """
        unbounded = self.max_steps is None and self.max_epochs is None and self.max_time is None
        if "fit" in self.stages and unbounded and not self.fast_dev_run:
            raise ConfigError(
                "nothing says when training ends",
                fix="set trainer.max_steps, trainer.max_epochs or trainer.max_time",
            )

    @property
    def max_time_s(self) -> float | None:
        """``max_time`` in seconds."""
        return seconds(self.max_time, option="trainer.max_time")


def run_in(world: World, trainer: Trainer) -> Result:
    """Runs ``trainer`` as one process of a job; what a launcher calls in each of them."""
    trainer._check_bounded()
    content, model = run_rank(trainer, world)
    return Result(content, model)


run_in.reports_ready = True  # type: ignore[attr-defined]  # once all processes have met


def _describe_task(task: Task, loading: Loading) -> dict[str, Any]:
    """The groups task, data and optimizer: what a task was made of, and what it is fed and steps.

    Data that the task makes when it is asked (a property) is its name alone, and so are optimizers
    that it builds itself.
    """
    kind = type(task)
    source = vars(task).get("data", getattr(kind, "data", None))
    known = isinstance(source, DataSource)
    spec = vars(task).get("optimizer", getattr(kind, "optimizer", None))
    builds = kind.build_optimizers is not Task.build_optimizers
    node = describe(task)
    knobs = describe(loading)
    return {
        "task": {key: value for key, value in node.items() if key not in ("data", "optimizer")},
        "data": {**knobs, **(describe(source) if known else {"_target_": f"{name_of(kind)}.data"})},
        "optimizer": name_of(kind.build_optimizers) if builds else describe(spec),
    }


def _own_command() -> tuple[str, ...]:
    """The command line of a script; nothing in a notebook or at a prompt, which have none."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return () if script is None else tuple(sys.orig_argv)


_OBJECTS = ("strategy", "schedule", "precision", "compression", "comm", "checkpoint", "launcher")
_BESIDE = (
    "task",
    "loading",
    "callbacks",
    "default_callbacks",
    "run_dir",
    "config",
    "command",
    "log_level",
)
_COUNTS = (
    "max_steps",
    "max_epochs",
    "accumulate",
    "log_every",
    "eval_every",
    "eval_every_epochs",
    "eval_batches",
    "overfit_batches",
)
