"""Stage 3 leaves parameters empty between their uses; who counts them sees their shapes."""

from __future__ import annotations

from functools import partial

import pytest
from torsh_trainer_deepspeed import DeepSpeed

from torsh_trainer.callbacks.summary import summarise
from torsh_trainer.comm.base import Communicator
from torsh_trainer.tasks.base import parameter_count
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome

Counted = tuple[str, tuple[int, int]]


def count_and_train(
    comm: Communicator, strategy: DeepSpeed, scenario: Scenario, *, counts: bool
) -> tuple[list[Counted], int, list[float]]:
    """What is counted within ``whole_shapes`` before and after two steps, parameters outside of it
    before them, and losses; without ``counts`` nothing is counted."""
    driver, outcome = Driver(comm, strategy, scenario), TrainingOutcome()
    engine = driver.engine
    counted: list[Counted] = []

    def count() -> None:
        if counts:
            with engine.whole_shapes():
                counted.append((summarise(engine.model), parameter_count(engine.model)))

    count()
    outside = parameter_count(engine.model)[0]
    for number in range(2):
        driver.step(number, outcome)
    count()
    driver.finish(outcome)
    return counted, outside, outcome.losses


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_parameters_that_are_empty_are_counted_and_train_on(threshold: int) -> None:
    scenario = Scenario()
    model = scenario.task.build_model()
    strategy = DeepSpeed(stage=3, stage3_param_persistence_threshold=threshold)
    undisturbed = shared_pool(2).run(partial(count_and_train, counts=False), strategy, scenario)
    counting = shared_pool(2).run(partial(count_and_train, counts=True), strategy, scenario)
    for (counted, outside, losses), (_, _, expected) in zip(counting, undisturbed, strict=True):
        assert counted == [(summarise(model), parameter_count(model))] * 2
        assert outside < parameter_count(model)[0]
        assert losses == expected
