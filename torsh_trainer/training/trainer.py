"""The trainer: what a run is made of, and the verbs that start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from torsh_trainer import environments
from torsh_trainer.callbacks.base import name_callbacks
from torsh_trainer.callbacks.defaults import with_defaults
from torsh_trainer.checkpoint.cli.loading import load_weights
from torsh_trainer.data.loading import Loading
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.rundir import fresh_name
from torsh_trainer.rundir.description import describe, name_of
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.training.process import run_rank
from torsh_trainer.training.run_spec import RunSpec
from torsh_trainer.utils import registry


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
class Trainer(RunSpec):
    """Everything a run is made of, and the verbs that start it.

    The objects come first; the knobs below them are the ``trainer`` group of the configuration
    under the same names. ``strategy`` and ``launcher`` may be names (``"fsdp"``, ``"local"``).
    ``run_dir`` None makes ``runs/<time>`` under the current directory. ``default_callbacks`` adds
    what the command line has: progress (``Console``), metrics.jsonl (``Jsonl``) and, where it is
    installed, TensorBoard's files; one among ``callbacks`` takes the place of its like. ``config``
    is what config.yaml holds and trackers are told; an empty one is written from the objects and
    knobs given here. ``command`` is what would start the run again; an empty one is this program's
    command line.

    Raises:
        ConfigError: a knob is out of range, or two contradict each other.
    """

    default_callbacks: bool = True

    def fit(self, *stages: str) -> Result:
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

    def _with_weights(self, checkpoint: str | os.PathLike[str], stage: str) -> Result:
        options = replace(self.checkpoint, resume=str(checkpoint))
        return replace(self, checkpoint=options, stages=(stage,)).run()

    def run(self) -> Result:
        """Runs ``stages`` in the processes that the launcher starts: what ``fit`` and others call.

        Where the processes exist already (torchrun, srun, mpirun), this one takes its place among
        them, as the environment says.

        Raises:
            TorshError: see ``fit``.
        """
        self.check_bounded()
        env = dict(os.environ)
        found = environments.detect(env)
        spec = self._spec()
        if self.run_dir is None and found is None:
            spec = replace(spec, run_dir=fresh_name(Path("runs")))
        log_dir = None if spec.run_dir is None else Path(spec.run_dir) / "logs"
        context = LaunchContext(env=env, found=found, log_dir=log_dir)
        result: Result = _launcher(spec).launch(run_in, spec, context=context)
        return result

    def _spec(self) -> RunSpec:
        """What the processes get: callbacks, configuration and command as of a command line."""
        spec = RunSpec(**{field.name: getattr(self, field.name) for field in fields(RunSpec)})
        spec = replace(spec, launcher=_launcher(spec))
        callbacks = with_defaults(self.callbacks) if self.default_callbacks else self.callbacks
        spec = replace(spec, callbacks=callbacks, command=self.command or _own_command())
        return replace(spec, config=self.config or _describe(spec))


def _launcher(spec: RunSpec) -> Launcher:
    if isinstance(spec.launcher, Launcher):
        return spec.launcher
    made: Launcher = registry.LAUNCHERS.load(spec.launcher)()
    return made


def run_in(world: World, spec: RunSpec) -> Result:
    """Runs ``spec`` as one process of a job; what a launcher calls in each of them."""
    spec.check_bounded()
    content, model = run_rank(spec, world)
    return Result(content, model)


run_in.reports_ready = True  # type: ignore[attr-defined]  # once all processes have met


def _describe(spec: RunSpec) -> dict[str, Any]:
    """What config.yaml has on the command line, as far as the objects tell what they are."""
    objects = {name: getattr(spec, name) for name in _OBJECTS}
    if isinstance(spec.strategy, str):
        objects["strategy"] = registry.strategy_class(spec.strategy)()
    knobs = [field.name for field in fields(spec) if field.name not in (*_OBJECTS, *_BESIDE)]
    return {
        "trainer": {name: describe(getattr(spec, name)) for name in knobs},
        **_describe_task(spec.task, spec.loading),
        **{name: describe(value) for name, value in objects.items()},
        "callbacks": {name: describe(c) for name, c in name_callbacks(spec.callbacks)},
        "log_level": spec.log_level,
    }


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


_OBJECTS = (
    "strategy",
    "schedule",
    "precision",
    "compression",
    "comm",
    "mesh",
    "checkpoint",
    "launcher",
)
_BESIDE = (
    "task",
    "loading",
    "callbacks",
    "run_dir",
    "config",
    "command",
    "log_level",
)
