"""The trainer: what a run is made of, and the verbs that start it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from torsh_trainer import environments
from torsh_trainer.callbacks.base import Callback
from torsh_trainer.checkpoint.base import CheckpointOptions
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
from torsh_trainer.schedule.base import Schedule, StatefulSchedule
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.task import Task
from torsh_trainer.uncalled import refuse_uncalled
from torsh_trainer.world import World

_INLINE = Inline()
Stage = Literal["fit", "evaluate", "test", "predict", "find_lr", "find_batch_size"]


@dataclass(frozen=True)
class Result:
    """What a run came to: ``content`` is result.json, ``model`` the trained module.

    The model stays in the process that trained it; a run in other processes gives None, and its
    weights lie in the checkpoint.
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

    def __getstate__(self) -> dict[str, Any]:
        return {"content": self.content, "model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything a run is made of.

    The objects come first; the knobs below them are the ``trainer`` group of the configuration
    under the same names. ``strategy`` may be a name (``"fsdp"``). ``run_dir`` None makes
    ``runs/<time>`` under the current directory. ``config`` is the resolved configuration, kept
    for config.yaml.

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
        unbounded = self.max_steps is None and self.max_epochs is None and self.max_time is None
        if "fit" in self.stages and unbounded and not self.fast_dev_run:
            raise ConfigError(
                "nothing says when training ends",
                fix="set trainer.max_steps, trainer.max_epochs or trainer.max_time",
            )

    def fit(self, *stages: Stage) -> Result:
        """Trains, and runs the other stages after it (default: ``self.stages``).

        Raises:
            TorshError: see errors.py; a failed run leaves result.json with the error.
        """
        return replace(self, stages=stages or self.stages).run()

    def evaluate(self, checkpoint: str) -> Result:
        """Metrics of the eval split under a checkpoint (its path, or a run directory)."""
        return self._with_weights(checkpoint, "evaluate")

    def test(self, checkpoint: str) -> Result:
        """Metrics of the test split under a checkpoint (its path, or a run directory)."""
        return self._with_weights(checkpoint, "test")

    def predict(self, checkpoint: str) -> Result:
        """Predictions for the predict split, in ``predictions.pt`` of the run directory."""
        return self._with_weights(checkpoint, "predict")

    def _with_weights(self, checkpoint: str, stage: Stage) -> Result:
        options = replace(self.checkpoint, resume=str(checkpoint))
        return replace(self, checkpoint=options, stages=(stage,)).run()

    def run(self) -> Result:
        """Runs the stages in the processes that the launcher starts; a library's own door.

        It reads the environment as the command line's door does.
        """
        env = dict(os.environ)
        found = environments.detect(env)
        trainer = self
        if self.run_dir is None and found is None:
            trainer = replace(self, run_dir=fresh_name(Path("runs")))
        log_dir = None if trainer.run_dir is None else Path(trainer.run_dir) / "logs"
        context = LaunchContext(env=env, found=found, log_dir=log_dir)
        result: Result = trainer.launcher.launch(run_in, trainer, context=context)
        return result

    @property
    def max_time_s(self) -> float | None:
        """``max_time`` in seconds."""
        return seconds(self.max_time, option="trainer.max_time")


def run_in(world: World, trainer: Trainer) -> Result:
    """Runs ``trainer`` as one process of a job; what a launcher calls in each of them."""
    content, model = run_rank(trainer, world)
    return Result(content, model)


run_in.reports_ready = True  # type: ignore[attr-defined]  # once all processes have met


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
