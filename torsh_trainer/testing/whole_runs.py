"""Whole runs of a trainer on the ranks of a test, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torsh_trainer.callbacks.base import Callback, EvaluationReport, StepReport
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.testing.compare import U32
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.state import whole_state
from torsh_trainer.training.rank_run import RankRun
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.training.trainer import Trainer


@dataclass(frozen=True)
class Numbers(Callback):
    """Keeps what is reported, by step."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, float] = field(default_factory=dict)

    def on_step(self, report: StepReport) -> None:
        numbers = report.metrics or {}
        self.losses[report.step] = numbers["loss"]
        self.norms[report.step] = numbers["grad_norm"]

    def on_evaluate(self, report: EvaluationReport) -> None:
        self.metrics[report.step] = report.metrics["loss"]


@dataclass
class RunOutcome:
    """Losses, gradient norms and evaluated losses by step; whole parameters and predictions at the
    end."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, float] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    predictions: Tensor | None = None

    def pair_numbers(self, expected: RunOutcome, *, first: int = 1) -> list[tuple[str, Any, Any]]:
        """(what it is, here, in ``expected``) of each number that began at step ``first``.

        Raises:
            AssertionError: the steps are others.
        """
        pairs = []
        for name in ("losses", "norms", "metrics"):
            ours, theirs = getattr(self, name), getattr(expected, name)
            assert set(ours) == {step for step in theirs if step >= first}, name
            pairs += [(f"{name} of step {step}", ours[step], theirs[step]) for step in ours]
        return pairs

    def assert_close(
        self,
        expected: RunOutcome,
        *,
        relative: float,
        parameters: float,
        norms: float = 0.0,
        first: int = 1,
    ) -> None:
        """Every quantity that began at step ``first`` is ``expected``'s.

        Numbers are at most ``relative`` of theirs apart, gradient norms ``norms`` if that is more,
        and each parameter ``parameters`` of its largest element.

        Raises:
            AssertionError: one is not; says which, and by how many units in the last place.
        """
        for what, ours, theirs in self.pair_numbers(expected, first=first):
            away = abs(ours - theirs) / abs(theirs)
            bound = max(relative, norms) if what.startswith("norms") else relative
            assert away <= bound, f"{what}: {away / U32:.1f} u"
        assert set(self.parameters) == set(expected.parameters)
        for name, value in expected.parameters.items():
            away = float((self.parameters[name] - value).abs().max() / value.abs().max())
            assert away <= parameters, f"parameters: {name} by {away / U32:.1f} u"
        assert self.predictions is not None
        assert expected.predictions is not None
        bound = 4 * parameters * float(expected.predictions.abs().max())
        torch.testing.assert_close(self.predictions, expected.predictions, rtol=0, atol=bound)


def run_on_rank(
    comm: Communicator,
    made: Trainer,
    folder: Path,
    until: int | None = None,
    spoil: Callable[[], object] | None = None,
    mode: Literal["sync", "async"] = "sync",
) -> RunOutcome:
    """Fits and predicts on this rank as a launched run does, up to step ``until``.

    It saves in ``folder``, by ``mode``, and goes on from what lies there. ``spoil`` is called
    first: a negative control breaks something by it.
    """
    numbers = Numbers()
    if spoil is not None:
        spoil()
    assert isinstance(made.strategy, Strategy)
    strategy, mesh = divide(comm.world, made.strategy, made.mesh)
    if not strategy.needs_process_group(comm.world):
        comm = LocalCommunicator(comm.device)
    saves = CheckpointOptions(dir=str(folder / "saved"), check_loaded=True, mode=mode)
    made = replace(made, callbacks=(numbers,), checkpoint=saves, stages=("fit", "predict"))
    made = made if until is None else replace(made, max_steps=until)
    parts = RunParts(made, comm.world, comm, mesh, strategy, folder)
    run = RankRun(parts, began=time.perf_counter())
    try:
        run.run()
        state = whole_state(parts.engine.state_dict(), parts.groups.data, parts.groups.pipeline)
    finally:
        run.close()
    comm.barrier()
    outputs = torch.load(folder / "predictions.pt")
    return RunOutcome(numbers.losses, numbers.norms, numbers.metrics, state["model"], outputs)


def run_in_turn(
    first: tuple[int, Trainer],
    second: tuple[int, Trainer],
    folder: Path,
    *,
    until: int,
    run: Callable[..., RunOutcome] = run_on_rank,
) -> list[RunOutcome]:
    """Runs ``first`` up to step ``until``, and ``second`` on from there: each with its number of
    ranks. What the ranks of ``second`` came to."""
    shared_pool(first[0]).run(run, first[1], folder, until)
    return shared_pool(second[0]).run(run, second[1], folder)
