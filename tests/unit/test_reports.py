"""What callbacks hear of a run, and the times of a report, by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from torsh_trainer import Callback
from torsh_trainer.callbacks.base import EvaluationReport, SaveReport, StepReport
from torsh_trainer.comm.compression.wire import Traffic
from torsh_trainer.errors import ConfigError
from torsh_trainer.training.cadence import Cadence
from torsh_trainer.training.reports import Reports, StepTimer, add_split


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("torsh_trainer.training.reports.time", made)
    return made


class Hearer(Callback):
    """Notes the steps that it hears of, and whether with numbers."""

    def __init__(self, answer: Any = None) -> None:
        self.heard: list[tuple[int, bool]] = []
        self.answer = answer

    def on_step(self, report: StepReport) -> Any:
        self.heard.append((report.step, report.metrics is not None))
        return self.answer

    def on_evaluate(self, report: EvaluationReport) -> Any:
        return self.answer


class Quiet(Hearer):
    every_step = False


def evaluation(wall_s: float) -> EvaluationReport:
    return EvaluationReport("eval", 1, 0, 8, {}, wall_s)


def test_times_are_means_a_step_without_what_was_no_training(clock) -> None:
    timer = StepTimer(step=10, samples=80)
    timer.waited_s += 1.0
    clock.now += 9.0
    timer.pause(5.0)  # an evaluation
    times = timer.read(step=12, samples=96)
    assert times == {"samples_per_s": 16 / 4.0, "data_wait_s": 0.5, "step_s": 2.0}
    clock.now += 4.0
    assert timer.read(step=13, samples=100) == {
        "samples_per_s": 1.0,
        "data_wait_s": 0.0,
        "step_s": 4.0,
    }
    assert timer.samples_per_s(100) == 20 / 8.0
    assert timer.samples_per_s(80) is None


def test_evaluations_and_saves_are_told_to_the_timer_too(clock) -> None:
    reports = Reports([Hearer()], Cadence(1))
    reports.begin(step=0, samples=0)
    clock.now += 7.0
    reports.tell_evaluation(evaluation(2.0))
    reports.tell_save(SaveReport(1, "", 3.0))
    metrics = reports.measure(step=1, samples=8, loss=0.5, lr=0.1, skipped=0)
    assert metrics["step_s"] == 2.0


def test_steps_between_reports_are_told_to_those_who_want_all() -> None:
    every, quiet, deaf = Hearer(), Quiet(), Callback()
    reports = Reports([every, quiet, deaf], Cadence(2))
    reports.begin(step=0, samples=0, last_step=5)
    for step in range(1, 6):
        due = step >= reports.next_step
        metrics = None
        if due:
            metrics = reports.measure(step=step, samples=step, loss=0.0, lr=0.1, skipped=0)
        reports.tell_step(step, 0, step, metrics)
    assert every.heard == [(1, True), (2, True), (3, False), (4, True), (5, True)]
    assert quiet.heard == [(step, True) for step in (1, 2, 4, 5)]
    assert reports.wants_all
    assert not Reports([quiet, deaf], Cadence(2)).wants_all
    assert reports.step == 5


def test_a_report_names_its_numbers_in_one_order() -> None:
    reports = Reports([], Cadence(1))
    reports.begin(step=0, samples=0)
    numbers = {"loss": 0.5, "lr": 0.1, "skipped": 1, "grad_norm": 2.0}
    metrics = reports.measure(step=1, samples=8, traffic=Traffic(6, 4), **numbers)
    assert list(metrics) == [
        *("loss", "lr", "grad_norm", "samples_per_s", "data_wait_s", "step_s", "skipped"),
        *("sent_bytes_per_step", "received_bytes_per_step"),
    ]
    assert {name: metrics[name] for name in numbers} == numbers


def test_bytes_are_counted_since_the_last_report_and_over_the_whole_fit() -> None:
    reports = Reports([], Cadence(1))
    reports.begin(step=4, samples=0)
    numbers = {"samples": 0, "loss": 0.5, "lr": 0.1, "skipped": 0}
    reports.measure(step=6, traffic=Traffic(100, 10), **numbers)
    metrics = reports.measure(step=8, traffic=Traffic(140, 30), **numbers)
    assert (metrics["sent_bytes_per_step"], metrics["received_bytes_per_step"]) == (20.0, 10.0)
    average = reports.average_traffic(Traffic(140, 30), step=8)
    assert average == {"sent_bytes_per_step": 35.0, "received_bytes_per_step": 7.5}
    assert set(reports.average_traffic(None, step=8).values()) == {None}


@pytest.mark.parametrize(("answers", "stops"), [((None, False), False), ((None, True), True)])
def test_one_callback_that_asks_to_stop_is_enough(answers, stops) -> None:
    reports = Reports([Hearer(answer) for answer in answers], Cadence(1))
    assert reports.tell_step(1, 0, 8, {}) is stops
    assert reports.tell_evaluation(evaluation(0.0)) is stops


def test_an_answer_that_is_no_truth_value_is_refused() -> None:
    reports = Reports([Hearer(0.5)], Cadence(1))
    with pytest.raises(ConfigError, match=r"Hearer.on_step returned a float"):
        reports.tell_step(1, 0, 8, {})
    with pytest.raises(ConfigError, match=r"Hearer.on_evaluate returned a float"):
        reports.tell_evaluation(evaluation(0.0))


def test_metrics_of_eval_have_bare_names_and_those_of_other_splits_theirs() -> None:
    assert add_split({"loss": 1.0, "test_loss": 3.0}, "eval", {"loss": 2.0}) == {"loss": 2.0}
    assert add_split({"loss": 1.0}, "test", {"loss": 2.0}) == {"loss": 1.0, "test_loss": 2.0}
