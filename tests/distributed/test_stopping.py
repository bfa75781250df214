"""Ranks that have to stop after the same step, whichever of them knows why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from torsh_trainer.comm.base import Communicator
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.training.stopping import Limits, Stop, StoppedError

STEPS = 100_000
"""More than any of them takes: one that never hears of the stop is seen."""


def last_step(comm: Communicator, cause: str, *, meet: bool) -> tuple[int, int]:
    """The step that rank 1's ``cause`` of step 3 has stopped this rank after, and its signal."""
    limits = Limits(max_time_s=0.0 if cause == "clock" and comm.rank == 1 else None)
    stop = Stop(comm, limits, started=time.perf_counter())
    with stop.signals:
        for step in range(1, STEPS):
            asks = comm.rank == 1 and step == 3
            if asks and cause == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.should_stop(step, asks and cause == "callback", meet=meet):
                return step, stop.signal
    return STEPS, 0


def test_ranks_that_meet_anyway_stop_after_the_very_step_that_one_wants_to() -> None:
    assert shared_pool(2).run(lambda comm: last_step(comm, "callback", meet=True)) == [(3, 0)] * 2
    stopped = shared_pool(2).run(lambda comm: last_step(comm, "signal", meet=True))
    assert stopped == [(3, signal.SIGTERM)] * 2


def test_those_that_do_not_agree_on_a_later_one() -> None:
    for cause, number in (("callback", 0), ("signal", signal.SIGTERM), ("clock", 0)):
        stopped = shared_pool(2).run(lambda comm, cause=cause: last_step(comm, cause, meet=False))
        assert stopped[0] == stopped[1], cause
        assert stopped[0][1] == number
        assert stopped[0][0] < STEPS


def heard_at_the_end(comm: Communicator) -> int:
    stop = Stop(comm, Limits(), started=time.perf_counter())
    with stop.signals:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stop.meet(5)
        return stop.signal


def test_a_signal_of_the_end_is_everybodys() -> None:
    assert shared_pool(2).run(heard_at_the_end) == [signal.SIGTERM] * 2


def evaluated(comm: Communicator) -> int:
    """How many batches of an evaluation this rank saw until rank 1's signal broke it off."""
    seen = 0

    def batches() -> Iterator[tuple[int, bool]]:
        for number in range(STEPS):
            if comm.rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield number, True

    stop = Stop(comm, Limits(), started=time.perf_counter())
    with stop.signals:
        try:
            for _ in stop.watch(batches()):
                seen += 1
        except StoppedError:
            return seen
    return STEPS


def test_an_evaluation_is_left_before_the_same_batch() -> None:
    first, second = shared_pool(2).run(evaluated)
    assert first == second < STEPS
