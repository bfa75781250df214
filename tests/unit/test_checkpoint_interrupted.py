"""Runs that are stopped, killed or done go on with what the undisturbed run has."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted_line import TIMES, Dice, Line, X, Y, equal, seed_all, trainer
from torch import nn
from torch.utils.data import IterableDataset

from torsh_trainer import (
    Callback,
    CheckpointOptions,
    Loading,
    Task,
)
from torsh_trainer.callbacks.base import StepReport
from torsh_trainer.callbacks.early_stopping import EarlyStopping
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.errors import Interrupted
from torsh_trainer.optim.schedule import ReduceOnPlateau
from torsh_trainer.tasks.base import Mean
from torsh_trainer.training.trainer import Result


class Stubborn(Line):
    """Sends this process a signal in the middle of the evaluation number ``at``."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at
        self.evaluations = self.batches = 0

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Mean]:
        if len(batch[0]) == 4 and self.batches % 3 == 0:
            self.evaluations += 1
        self.batches += 1
        if self.evaluations == self.at and self.batches % 3 == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        torch.rand(())  # as an evaluation may
        return super().evaluate(model, batch)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def reports(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def pieces(task: Task, *more: Callback, **knobs: Any) -> dict[str, Any]:
    """A run that has everything which a wrong resume could count twice or forget."""
    return {
        "task": task,
        "max_steps": 14,
        "log_every": 4,
        "eval_every": 3,
        "loading": Loading(batch_size=8, eval_batch_size=4),
        "schedule": ReduceOnPlateau(patience=0, threshold=0.05),
        "callbacks": [Jsonl(), EarlyStopping(patience=4), Dice(), *more],
        "checkpoint": CheckpointOptions(every_steps=6),
        **knobs,
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    seed_all(0)
    result = trainer(folder, **pieces(Stubborn())).fit()
    return result, reports(folder)


@pytest.mark.parametrize("evaluation", [1, 2, 4])
def test_a_signal_within_an_evaluation_is_acted_on_at_once_and_the_evaluation_is_run_again(
    tmp_path: Path, undisturbed: tuple[Result, list[dict[str, Any]]], evaluation: int
) -> None:
    folder, task = tmp_path / "run", Stubborn(at=evaluation)
    seed_all(0)
    with pytest.raises(Interrupted) as caught:
        trainer(folder, **pieces(task)).fit()
    assert caught.value.facts["step"] == 3 * evaluation
    assert task.batches == 3 * evaluation - 2  # the rest of it was left
    seed_all(1)
    resumed = trainer(folder, **pieces(Stubborn())).fit()
    whole, expected = undisturbed
    assert reports(folder) == expected
    assert equal(resumed, whole)
    assert resumed.metrics == whole.metrics
    assert resumed.content["train_loss"] == whole.content["train_loss"]


@pytest.mark.parametrize("step", [2, 3, 6, 13])
def test_a_run_that_was_stopped_reports_what_the_undisturbed_run_reports(
    tmp_path: Path, undisturbed: tuple[Result, list[dict[str, Any]]], step: int
) -> None:
    folder = tmp_path / "run"
    seed_all(0)
    with pytest.raises(Interrupted):
        trainer(folder, **pieces(Stubborn(), StopAt(step))).fit()
    resumed = trainer(folder, **pieces(Stubborn())).fit()
    whole, expected = undisturbed
    assert reports(folder) == expected
    assert equal(resumed, whole)


def test_a_run_that_is_killed_and_goes_on_from_an_older_checkpoint_reports_no_step_twice(
    tmp_path: Path, undisturbed: tuple[Result, list[dict[str, Any]]]
) -> None:
    class Killed(Callback):
        def on_step(self, report: StepReport) -> None:
            if report.step == 11:
                raise RuntimeError("killed")

    folder = tmp_path / "run"
    seed_all(0)
    with pytest.raises(RuntimeError, match="killed"):
        trainer(folder, **pieces(Stubborn(), Killed())).fit()
    assert [row["step"] for row in reports(folder)][-1] > 6
    trainer(folder, **pieces(Stubborn())).fit()
    assert reports(folder) == undisturbed[1]


def test_a_signal_in_the_last_evaluation_leaves_a_run_that_ends_with_it(tmp_path: Path) -> None:
    folder, knobs = tmp_path / "run", {"eval_every": 100}
    whole = trainer(tmp_path / "whole", **pieces(Stubborn(), **knobs)).fit()
    with pytest.raises(Interrupted):
        trainer(folder, **pieces(Stubborn(at=1), **knobs)).fit()
    resumed = trainer(folder, **pieces(Stubborn(), **knobs)).fit()
    assert resumed.metrics == whole.metrics != {}
    assert reports(folder) == reports(tmp_path / "whole")


def test_a_finished_run_that_is_started_again_trains_no_more_and_reports_nothing_twice(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    first = trainer(folder, **pieces(Stubborn())).fit()
    before = reports(folder)
    again = trainer(folder, **pieces(Stubborn())).fit()
    assert again.content["steps"] == first.content["steps"] == 14
    assert again.metrics == first.metrics
    assert reports(folder) == before


def test_a_stream_that_had_its_epochs_trains_no_more(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(X, Y, strict=True))

    task = Line()
    task.data.train = Stream()
    knobs: dict[str, Any] = {"task": task, "max_steps": None, "max_epochs": 2}
    assert trainer(tmp_path / "run", **knobs).fit().content["steps"] == 12
    assert trainer(tmp_path / "run", **knobs).fit().content["steps"] == 12


def test_a_run_that_had_stopped_early_stays_so_unless_it_is_given_more_patience(
    tmp_path: Path,
) -> None:
    def run(patience: int) -> Result:
        stop = EarlyStopping(patience=patience, min_delta=1e9)
        return trainer(
            tmp_path / "run", max_steps=20, eval_every=2, callbacks=[stop], max_epochs=None
        ).fit()

    assert run(2).content["steps"] == 6
    assert run(2).content["steps"] == 6
    assert run(5).content["steps"] == 12


def test_two_callbacks_of_one_class_keep_a_state_each(tmp_path: Path) -> None:
    class Counter(Callback):
        def __init__(self, by: int) -> None:
            self.by, self.count = by, 0

        def on_step(self, report: StepReport) -> None:
            self.count += self.by

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.count = state["count"]

    def counted(steps: int) -> list[int]:
        both = [Counter(1), Counter(10)]
        trainer(tmp_path / "run", max_steps=steps, callbacks=both).fit()
        return [one.count for one in both]

    assert counted(3) == [3, 30]
    assert counted(5) == [5, 50]


def test_a_step_whose_evaluation_was_broken_off_is_saved_again_with_its_metrics(
    tmp_path: Path,
) -> None:
    def told(run: str) -> Any:
        path = tmp_path / run / "checkpoints" / "step-00000006" / "manifest.json"
        return json.loads(path.read_text())["metrics"]

    trainer(tmp_path / "whole", **pieces(Stubborn())).fit()
    with pytest.raises(Interrupted):
        trainer(tmp_path / "parts", **pieces(Stubborn(at=2))).fit()
    assert told("parts") == {}
    trainer(tmp_path / "parts", **pieces(Stubborn())).fit()
    assert told("parts") == told("whole") != {}
