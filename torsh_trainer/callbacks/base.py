"""The contract of a callback: it receives values, never the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run, known before its first step.

    ``batch_size`` and ``micro_batch_size`` are 0 where a task's own loaders say them.
    ``units_per_sample``/``unit`` turn samples into tokens for throughput. ``flops_per_sample`` and
    ``peak_flops`` (of all devices together, per second) are None when unknown. ``config`` is the
    resolved configuration (plain dicts) or what the library was given. ``max_steps`` None means
    that epochs or time bound the run; ``steps_per_epoch`` None that the data has no length.
    ``first_step`` is how many steps were done before this run (0 unless it resumes).
    ``numerics`` says in words what decides beside ``precision`` how numbers are rounded.
    ``total_steps`` is the step at which the run will end, however it is bounded (None: unknown),
    and ``max_time_s`` the time that it may take: what a progress bar counts towards. ``trains``
    False only evaluates or predicts. ``notes`` are lines of the summary that the task gives, by
    their word. ``normalised`` is how many samples a BatchNorm of the model normalises together, 0
    without one. ``loader_processes`` are those of each training process.
    """

    run_dir: Path | None
    world: World
    strategy: str
    backend: str
    precision: str
    device: str
    batch_size: int
    micro_batch_size: int
    accumulate: int
    max_steps: int | None
    steps_per_epoch: int | None
    first_step: int
    parameters: int
    trainable_parameters: int
    unit: str = "samples"
    units_per_sample: float = 1.0
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    threads: int = 1
    model_summary: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    max_time_s: float | None = None
    trains: bool = True
    normalised: int = 0
    numerics: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    loader_processes: int = 0


class StepReport:
    """One step that is done. ``step`` counts from 1; ``samples`` is the total consumed so far.

    ``metrics`` is None on most steps. On a step that is logged (every ``trainer.log_every``, the
    first and the last) it holds plain numbers, the same on every rank, with at least: ``loss``
    (mean over the global batches since the last report), ``lr``, ``grad_norm``,
    ``samples_per_s``, ``data_wait_s`` and ``step_s`` (means a step since the last report), and
    ``skipped`` (steps skipped since the start).
    """

    __slots__ = ("epoch", "metrics", "samples", "step")

    def __init__(
        self, step: int, epoch: int, samples: int, metrics: Mapping[str, float] | None
    ) -> None:
        self.step = step
        self.epoch = epoch
        self.samples = samples
        self.metrics = metrics


@dataclass(frozen=True)
class EvaluationReport:
    """The metrics of an evaluation: ``split`` is eval or test; ``metrics`` are plain numbers."""

    split: str
    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]
    wall_s: float


@dataclass(frozen=True)
class SaveReport:
    """A checkpoint: complete on disk, or on its way there under ``checkpoint.mode=async``."""

    step: int
    path: str
    wall_s: float


class Callback:
    """Hooks of a run; every method does nothing unless overridden. Called on every rank.

    A callback that writes files or speaks to the user returns early unless
    ``info.world.is_rank_zero`` (see ``RankZeroOnly``). ``on_step`` runs each step; keep it cheap.
    ``load_state_dict``, when there is a checkpoint, comes before ``on_start``.
    """

    every_step: ClassVar[bool] = True
    """False hears of a step only when it is logged: nothing is called on the steps between."""

    requires: ClassVar[str | None] = None
    """Import name of the optional library that this callback needs; ``enabled: auto`` leaves the
    callback out where that library is not installed."""

    def on_start(self, info: RunInfo) -> bool | None:
        """Before the first step; True asks the run not to train at all."""

    def on_step(self, report: StepReport) -> bool | None:
        """After each step; True asks the run to stop, here or on any rank."""

    def on_evaluate(self, report: EvaluationReport) -> bool | None:
        """After an evaluation; True asks the run to stop."""

    def on_save(self, report: SaveReport) -> None:
        """After a checkpoint is complete."""

    def on_error(self, error: BaseException) -> None:
        """When the run fails; ``on_end`` does not follow.

        Also where processes come and go, before the others begin anew with ``on_start``.
        """

    def on_end(self, result: Mapping[str, Any]) -> None:
        """After the last step, with the content of result.json."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave."""


class RankZeroOnly(Callback):
    """A callback that lives on rank 0 alone; the loop leaves it out on every other rank."""


def asks_to_stop(callback: Callback, hook: str, answer: Any) -> bool:
    """Whether what a hook returned is True.

    Raises:
        ConfigError: it is neither a truth value nor None: a number that is not 0 stops no run.
    """
    if answer is None or isinstance(answer, bool):
        return bool(answer)
    if str(getattr(answer, "dtype", "")).endswith("bool"):
        return bool(answer)
    raise ConfigError(
        f"{type(callback).__name__}.{hook} returned a {type(answer).__name__}",
        fix="return True to stop the run, False or None to go on",
    )


def name_callbacks(callbacks: Sequence[Callback]) -> list[tuple[str, Callback]]:
    """Callbacks under the names of their classes, numbered from the second of a class on."""
    count: Counter[str] = Counter()
    named = []
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        named.append((name if count[name] == 1 else f"{name}_{count[name]}", callback))
    return named


def states_of(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """The states of those callbacks that have one, for a checkpoint."""
    states = {name: callback.state_dict() for name, callback in name_callbacks(callbacks)}
    return {name: state for name, state in states.items() if state}


def load_states(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> None:
    """Gives callbacks back what ``states_of`` gave; one without a state keeps its own."""
    for name, callback in name_callbacks(callbacks):
        if states.get(name):
            callback.load_state_dict(states[name])
