"""Runs that are interrupted and go on: whole trainers on ranks, and what they did, bit for bit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset

from torsh_trainer.callbacks.base import Callback, EvaluationReport, StepReport
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.batch import MicroBatch
from torsh_trainer.strategies.base import Clip, Engine, LossReport, StepOutcome, Strategy
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.testing.tiny import LENGTH, PADDING, VOCABULARY, TinyModelOptions, TinyTask
from torsh_trainer.training.rank_run import RankRun
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.training.trainer import Trainer

SAMPLES = 22
"""Two global batches of 8 and a tail of 6."""


class Sentences(Dataset[dict[str, Tensor]]):
    """``{"id", "tokens", "targets", "factor"}``: as TinyTask wants them, of different lengths.

    ``factor`` is drawn anew whenever a sample is fetched, as an augmentation is; that of the
    sample ``spoilt`` is infinite.
    """

    def __init__(self, size: int = SAMPLES, *, augmented: bool, spoilt: int | None = None) -> None:
        generator = torch.Generator().manual_seed(17)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
        kept = torch.randint(1, LENGTH + 1, (size, 1), generator=generator)
        targets = (self.tokens * 3 + 1) % VOCABULARY
        self.targets = targets.masked_fill(torch.arange(LENGTH) >= kept, PADDING)
        self._augmented = augmented
        self._spoilt = spoilt

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        factor = 0.5 + torch.rand(()) if self._augmented else torch.ones(())
        if index == self._spoilt:
            factor = torch.full((), float("inf"))
        return {
            "id": torch.tensor(index),
            "tokens": self.tokens[index],
            "targets": self.targets[index],
            "factor": factor,
        }


class SentenceTask(TinyTask):
    """The tiny task with data of its own; ``optimizers`` is sgd (with momentum), adamw or both."""

    def __init__(
        self,
        options: TinyModelOptions = TinyModelOptions(),
        *,
        optimizers: str = "sgd",
        spoilt: int | None = None,
    ) -> None:
        super().__init__(options)
        self.optimizers = optimizers
        self.data = DataSource()
        self.data.train = Sentences(augmented=True, spoilt=spoilt)
        self.data.eval = Sentences(10, augmented=False)

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        """Parameter groups in another order than the model's, so that only names can match."""
        named = list(named_parameters)
        norms = [p for name, p in named if "norm" in name]
        others = [p for name, p in named if "norm" not in name]
        head = [p for name, p in named if name.startswith("head")]
        body = [p for name, p in named if not name.startswith("head")]
        if self.optimizers == "sgd":
            return {"main": SGD([{"params": norms}, {"params": others}], lr=0.1, momentum=0.9)}
        if self.optimizers == "adamw":
            groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "lr": 0.002}]
            return {"main": AdamW(groups, lr=0.01, weight_decay=0.0)}
        return {"head": AdamW(head, lr=0.01), "body": SGD(body, lr=0.1, momentum=0.9)}


class _StopAfter(Callback):
    """Asks to stop after a step, as a deadline or a signal does."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step(self, report: StepReport) -> bool:
        """True at that step."""
        return report.step == self._step


class _Evaluations(Callback):
    """Keeps what evaluations gave, by step."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}

    def on_evaluate(self, report: EvaluationReport) -> None:
        """Called after each evaluation."""
        self.metrics[report.step] = dict(report.metrics)


@dataclass
class Leg:
    """What one rank did between two interruptions, by step from 1.

    ``consumed`` are the ids of the samples that counted, by micro-batch; ``losses`` this rank's,
    by micro-batch. ``state`` is this rank's part of the engine's afterwards.
    """

    consumed: dict[int, list[list[int]]] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    weights: dict[int, list[float]] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    skipped: dict[int, bool] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def follow(self, other: Leg) -> None:
        """Takes in what ``other`` did afterwards."""
        for name in ("consumed", "losses", "weights", "norms", "skipped", "evaluations", "rates"):
            mine, theirs = getattr(self, name), getattr(other, name)
            # An evaluation at the end of a leg is due in no uninterrupted run.
            mine.update({step: value for step, value in theirs.items() if step not in mine})
        self.state = other.state


def live(
    comm: Communicator,
    trainer: Trainer,
    folder: Path,
    *,
    until: int | None = None,
    change: Callable[[RunParts], None] | None = None,
) -> Leg:
    """One life of a run on this rank: resumes where it can, stops after step ``until``.

    ``change(parts)`` may meddle before anything is loaded, for a negative control.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, Strategy)
    if not strategy.needs_process_group(comm.world):
        comm = LocalCommunicator(comm.device)
    seen = _Evaluations()
    trainer = replace(trainer, callbacks=(*trainer.callbacks, seen, _StopAfter(until)))
    # A new process would begin with other random numbers than the one that was interrupted.
    torch.manual_seed(time.monotonic_ns() % 2**31)
    with _deterministic():
        strategy, mesh = divide(comm.world, strategy, trainer.mesh)
        parts = RunParts(trainer, comm.world, comm, mesh, strategy, folder)
        run = RankRun(parts, began=time.perf_counter())
        try:
            leg = Leg()
            if change is not None:
                change(parts)
            _watch(parts, parts.engine, leg)
            run.run()
            leg.evaluations = seen.metrics
            leg.state = _mine(parts.engine.state_dict())
        finally:
            run.close()
    return leg


def lives(comm: Communicator, trainer: Trainer, folder: Path, stops: Sequence[int | None]) -> Leg:
    """A run that is interrupted after each of ``stops`` and goes on from its checkpoint."""
    journey = Leg()
    for until in stops:
        journey.follow(live(comm, trainer, folder, until=until))
    return journey


def saving(folder: Path, **options: Any) -> CheckpointOptions:
    """Checkpoints in ``folder``, saved when a leg ends."""
    return CheckpointOptions(dir=str(folder), **options)


def _mine(value: Any) -> Any:
    """This rank's part of a state, copied."""
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    if isinstance(value, FlatShard):
        return value.tensor.detach().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _mine(entry) for key, entry in value.items()}
    return value


def _watch(parts: RunParts, engine: Engine, leg: Leg) -> None:
    """Writes down what the loop asks of the engine, and what it gets."""
    forward_backward, step = engine.forward_backward, engine.step

    def watch_forward_backward(
        micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        number = parts.program.position.step + 1
        counted = [micro for micro in micro_batches if micro.weight]
        leg.consumed[number] = [micro.batch["id"].tolist() for micro in counted]
        report = forward_backward(micro_batches, total_weight, task)
        pairs = [(float(loss), weight) for loss, weight in report.parts if weight]
        leg.losses[number] = [loss for loss, _ in pairs]
        leg.weights[number] = [weight for _, weight in pairs]
        return report

    def watch_step(clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        number = parts.program.position.step + 1
        groups = [group for o in engine.optimizers.values() for group in o.param_groups]
        leg.rates[number] = [float(group["lr"]) for group in groups]
        outcome = step(clip, measure_norm=True)
        assert outcome.grad_norm is not None
        leg.norms[number] = float(outcome.grad_norm)
        leg.skipped[number] = outcome.skipped
        return outcome

    watched: Any = engine
    watched.forward_backward = watch_forward_backward
    watched.step = watch_step


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def as_dicts(value: Any) -> Any:
    """Values of dataclasses, lists and tuples as a nest of dicts, for ``differences``."""
    if is_dataclass(value):
        value = vars(value)
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    return {k: as_dicts(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Where two nests of values differ by a single bit, a type or a name."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        names = dict.fromkeys([*ours, *theirs])
        found = []
        for name in names:
            place = f"{at}/{name}"
            if name not in ours or name not in theirs:
                found.append(f"{place} on one side only")
            else:
                found += differences(ours[name], theirs[name], place)
        return found
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        # NaN has many bit patterns, and none equals itself.
        same = ours.dtype == theirs.dtype and torch.allclose(
            ours, theirs, rtol=0.0, atol=0.0, equal_nan=True
        )
        return [] if same else [at]
    same = type(ours) is type(theirs) and repr(ours) == repr(theirs)
    return [] if same else [f"{at}: {ours!r} and {theirs!r}"]
