"""When one process stops: signals, the clock, and what a callback asks for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.training.stopping import Limits, Stop, StoppedError


def stop_of(max_time_s: float | None = None) -> Stop:
    limits = Limits(max_time_s=max_time_s)
    return Stop(LocalCommunicator(), limits, started=time.perf_counter())


def test_a_signal_stops_after_the_step_in_which_it_came() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = stop_of()
    with stop.signals:
        assert not stop.should_stop(1, False, meet=False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.should_stop(2, False, meet=False)
    assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("saves", "words"), [(True, "checkpoint.resume=auto"), (False, "nothing was saved")]
)
def test_its_error_says_which_step_and_how_to_go_on(saves: bool, words: str) -> None:
    stop = stop_of()
    with stop.signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        stop.meet(7)
    error = stop.make_error(7, saves=saves)
    assert error.sentence == "stopped by SIGUSR1 after step 7"
    assert words in (error.fix or "")
    assert (error.facts["signal"], error.facts["step"]) == (signal.SIGUSR1, 7)


@pytest.mark.parametrize(("limit_s", "stops"), [(0.0, True), (3600.0, False), (None, False)])
def test_so_does_the_clock(limit_s: float | None, stops: bool) -> None:
    stop = stop_of(limit_s)
    with stop.signals:
        assert stop.should_stop(1, False, meet=False) is stops
        assert stop.signal == 0


def test_what_a_callback_has_asked_for_once_stays_asked_for() -> None:
    stop = stop_of()
    with stop.signals:
        assert stop.should_stop(1, True, meet=False)
        assert stop.should_stop(2, False, meet=False)


def test_an_evaluation_is_left_before_the_batch_after_the_signal() -> None:
    seen: list[int] = []

    def batches() -> Iterator[tuple[int, bool]]:
        for number in range(9):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield number, True

    stop = stop_of()
    with stop.signals, pytest.raises(StoppedError):
        seen.extend(number for number, _ in stop.watch(batches()))
    assert seen == [0, 1, 2]
    assert stop.signal == signal.SIGINT
