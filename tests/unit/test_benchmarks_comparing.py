"""How the benchmarks compare: turns, ratios to what runs beside, and the spread that is told."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def comparing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repository))
    return importlib.import_module("benchmarks.comparing")


def test_contenders_take_turns_and_every_second_round_is_in_the_opposite_order(
    comparing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []
    seen = comparing.in_turns(
        "abc", lambda one: order.append(one) or len(order), rounds=3, said=str
    )
    assert order == [*"abc", *"cba", *"abc"]
    assert seen == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert capsys.readouterr().out.split() == [str(number) for number in range(1, 10)]


def test_a_machine_that_slows_down_favours_neither_side(comparing: Any) -> None:
    """Both sides take what the machine makes of a second: bare, contender, bare, and so on."""
    slower = [1.0 + 0.1 * turn for turn in range(21)]
    even, twice = (
        comparing.Blocks([factor * s for s in slower[1::2]], slower[0::2]) for factor in (1.0, 2.0)
    )
    assert even.ratio.low == pytest.approx(1.0) == even.ratio.high
    assert twice.ratio.value == pytest.approx(2.0)
    assert even.extra_us.value == pytest.approx(0.0, abs=1e-6)
    assert sum(slower[1::2]) != pytest.approx(sum(slower[2::2])), "one neighbour would not do"


def test_the_interval_holds_the_median_as_often_as_it_says(comparing: Any) -> None:
    draw = random.Random(0)
    trials = 1000
    held = 0
    for _ in range(trials):
        spread = comparing.Spread.confident([draw.gauss(5.0, 1.0) for _ in range(60)])
        held += spread.low <= 5.0 <= spread.high
    assert 0.93 < held / trials < 0.99
    assert comparing.Spread.extremes([3.0, 1.0, 2.0]) == comparing.Spread(2.0, 1.0, 3.0)
