"""What is due when, beside its plain definition."""

from __future__ import annotations

import itertools

import pytest

from torsh_trainer.training.cadence import Cadence

STEPS = range(1, 25)


@pytest.mark.parametrize("begins", [0, 1, 6])
@pytest.mark.parametrize("last", [None, 1, 10, 12, 24])
@pytest.mark.parametrize("every", [1, 3, 50])
def test_reports_are_of_the_first_step_the_last_and_every_so_many(every, last, begins) -> None:
    cadence, found, step = Cadence(every), [], begins
    while (step := cadence.next_report(step, last_step=last)) <= STEPS[-1]:
        found.append(step)
    due = [step for step in STEPS if step % every == 0 or step in (1, last)]
    assert found == [step for step in due if step > begins]


@pytest.mark.parametrize(("evaluates", "saves"), [*itertools.product([None, 2, 5], [None, 1, 3])])
def test_nothing_is_due_by_its_number_between_two_stops(evaluates, saves) -> None:
    cadence, stops, step = Cadence(1, eval_every=evaluates, save_every=saves), [], 0
    while (step := cadence.next_stop(step)) <= STEPS[-1]:
        stops.append(step)
    due = [s for s in STEPS if cadence.evaluates_after(s) or cadence.saves_after(s)]
    assert stops == due
    multiples = [s for s in STEPS if saves and not s % saves]
    assert [s for s in due if cadence.saves_after(s)] == multiples


def test_an_epoch_counts_where_it_has_ended() -> None:
    cadence = Cadence(1, eval_every=4, eval_every_epochs=2, save_every_epochs=3)
    assert not cadence.evaluates_after(5)
    assert [epoch for epoch in range(1, 7) if cadence.evaluates_after(5, epoch)] == [2, 4, 6]
    assert [epoch for epoch in range(1, 7) if cadence.saves_after(5, epoch)] == [3, 6]


@pytest.mark.parametrize(
    ("knobs", "saves"),
    [({}, False), ({"save_at_end": True}, True), ({"save_every": 3}, True)],
)
def test_it_knows_whether_anything_is_ever_saved(knobs, saves) -> None:
    assert Cadence(1, **knobs).saves is saves
