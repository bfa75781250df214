"""Going on, on several ranks: refusals that all of them raise, signals in evaluations, streams."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torsh_trainer import DDP, FSDP, Callback, CheckpointOptions, Loading, Trainer
from torsh_trainer.callbacks.base import EvaluationReport, StepReport
from torsh_trainer.callbacks.early_stopping import EarlyStopping
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Interrupted, TorshError
from torsh_trainer.optim.schedule.plateau import ReduceOnPlateau
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.tasks.base import Mean
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import SentenceTask
from torsh_trainer.testing.state import whole_state
from torsh_trainer.testing.tiny import TinyModelOptions
from torsh_trainer.training.rank_run import RankRun
from torsh_trainer.training.run_parts import RunParts

STEPS = 12
BATCHES = 5
"""Of an evaluation, on each of two ranks."""


class Diary(Callback):
    """Every report of a rank, and what it draws from its own streams."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, Mapping[str, float]]] = []
        self.drawn: list[tuple[float, float]] = []

    def on_step(self, report: StepReport) -> None:
        self.drawn.append((float(torch.rand(())), random.random()))
        if report.metrics is not None:
            lasting = ("loss", "lr", "grad_norm", "skipped")
            numbers = {k: v for k, v in report.metrics.items() if k in lasting}
            self.told.append(("train", report.step, numbers))

    def on_evaluate(self, report: EvaluationReport) -> None:
        self.told.append(("eval", report.step, dict(report.metrics)))


class Signalled(SentenceTask):
    """Its process gets a signal before batch ``at`` of all that are evaluated."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__(TinyModelOptions(dropout=0.3), optimizers="adamw")
        self.at = at
        self.batches = 0

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Mean]:
        if self.batches == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        self.batches += 1
        return super().evaluate(model, batch)


def made(folder: Path, strategy: Strategy, **knobs: Any) -> Trainer:
    """A run whose reports, evaluations and saves fall on different steps."""
    defaults: dict[str, Any] = {
        "task": Signalled(),
        "strategy": strategy,
        "loading": Loading(batch_size=8, micro_batch_size=1, eval_batch_size=1),
        "schedule": ReduceOnPlateau(patience=0, threshold=0.5),
        "max_steps": STEPS,
        "log_every": 5,
        "eval_every": 3,
        "eval_every_epochs": None,
        "callbacks": (EarlyStopping(patience=50),),
        "checkpoint": CheckpointOptions(dir=str(folder)),
        "device": "cpu",
        "log_level": "error",
    }
    return Trainer(**{**defaults, **knobs})


def lived(comm: Communicator, trainer: Trainer, folder: Path, *, seed: int = 0) -> dict[str, Any]:
    """One life of a run on this rank: what it reported, drew and left, or its error."""
    torch.manual_seed(100 * seed + comm.world.rank)
    random.seed(100 * seed + comm.world.rank)
    strategy = trainer.strategy
    assert isinstance(strategy, Strategy)
    diary = Diary()
    trainer = replace(trainer, callbacks=(*trainer.callbacks, diary))
    mesh = strategy.mesh(comm.world)
    parts = RunParts(trainer, comm.world, comm, mesh, strategy, folder)
    run = RankRun(parts, began=time.perf_counter())
    try:
        run.run()
        state = whole_state(parts.engine.state_dict(), comm)["model"]
        return {"told": diary.told, "drawn": diary.drawn, "model": state}
    except TorshError as error:
        batches = getattr(trainer.task, "batches", 0)
        return {
            "error": error,
            "told": diary.told,
            "drawn": diary.drawn,
            "batches": batches,
            "step": parts.program.position.step if "engine" in vars(parts) else 0,
        }
    finally:
        run.close()


def together(first: list[Any], last: list[Any], number: int) -> list[Any]:
    """The reports of two lives; of the first, less what it told of the rest as it stopped."""
    return [row for row in first if row[:2] != ("train", number)] + last


def interrupted_within_an_evaluation(
    comm: Communicator, folder: Path, strategy: Strategy, batch: int
) -> dict[str, Any]:
    """The undisturbed run, and the same with a signal in ``batch`` of the second evaluation."""
    whole = lived(comm, made(folder / "whole", strategy), folder)
    last = comm.world.rank == comm.world.size - 1
    at = BATCHES + batch if last else None
    first = lived(comm, made(folder / "parts", strategy, task=Signalled(at)), folder)
    again = lived(comm, made(folder / "parts", strategy), folder, seed=1)
    return {"whole": whole, "first": first, "again": again}


def check_interrupted(strategy: Strategy, tmp_path: Path, *, batch: int, seen: int) -> None:
    for answer in shared_pool(2).run(interrupted_within_an_evaluation, tmp_path, strategy, batch):
        whole, first, again = answer["whole"], answer["first"], answer["again"]
        assert isinstance(first["error"], Interrupted)
        assert first["step"] == 6
        assert first["batches"] == BATCHES + seen
        assert together(first["told"], again["told"], 6) == whole["told"]
        # What it drew after the save, as it told of the rest, did not count.
        assert first["drawn"][:6] + again["drawn"] == whole["drawn"]
        for name, tensor in whole["model"].items():
            assert torch.equal(again["model"][name], tensor), name


def test_a_signal_to_one_rank_in_an_evaluation_stops_all_and_the_run_goes_on_as_if_none_had(
    tmp_path: Path,
) -> None:
    check_interrupted(DDP(), tmp_path, batch=0, seen=1)


def test_the_same_holds_while_parameters_are_sharded(tmp_path: Path) -> None:
    check_interrupted(FSDP(), tmp_path, batch=0, seen=1)


def test_a_signal_in_the_last_batch_lets_the_evaluation_end_and_it_is_not_run_again(
    tmp_path: Path,
) -> None:
    check_interrupted(DDP(), tmp_path, batch=BATCHES - 1, seen=BATCHES)


def test_every_rank_refuses_in_the_same_words_what_only_one_rank_sees(tmp_path: Path) -> None:
    def case(comm: Communicator) -> list[tuple[str, list[str] | None]]:
        strategy = DDP()
        lived(comm, made(tmp_path / "run", strategy, max_steps=2), tmp_path)
        seed = lived(comm, made(tmp_path / "run", strategy, seed=4), tmp_path)
        shorter = Signalled()
        if comm.world.rank == 1:
            shorter.data.train.tokens = shorter.data.train.tokens[:20]
        data = lived(comm, made(tmp_path / "run", strategy, task=shorter), tmp_path)
        return [(str(one["error"]), one["error"].facts.get("allow")) for one in (seed, data)]

    first, second = shared_pool(2).run(case)
    assert first == second
    assert "trainer.seed was 0 and is 4" in first[0][0]
    assert first[0][1] == ["seed"]
    assert "data.train is 22 samples on rank 0 and 20 samples on rank 1" in first[1][0]


def test_a_report_that_an_interruption_cut_in_two_is_the_same_on_fewer_ranks(
    tmp_path: Path,
) -> None:
    # All ranks meet in the evaluation, between two reports, and so agree to stop there.
    knobs: dict[str, Any] = {"eval_every": 7, "schedule": None, "max_steps": 10, "log_every": 10}

    class Stop(Callback):
        def on_step(self, report: StepReport) -> bool:
            return report.step == 7

    def begin(comm: Communicator) -> Any:
        run = made(tmp_path / "whole", DDP(), **knobs)
        whole = lived(comm, run, tmp_path)
        stopped = made(tmp_path / "run", DDP(), **{**knobs, "callbacks": (Stop(),)})
        lived(comm, stopped, tmp_path)
        return whole["told"]

    def go_on(comm: Communicator) -> Any:
        life = lived(comm, made(tmp_path / "run", DDP(), **knobs), tmp_path)
        assert "error" not in life, life["error"]
        return life["told"]

    whole = shared_pool(4).run(begin)[0]
    parts = shared_pool(2).run(go_on)[0]
    assert [row[:2] for row in parts] == [("train", 10), ("eval", 10)]
    (expected,) = [row for row in whole if row[:2] == ("train", 10)]
    assert abs(parts[0][2]["loss"] - expected[2]["loss"]) <= 1e-5 * expected[2]["loss"]
