"""What zero1 promises on any number of ranks, checked by tests of several backends."""

from __future__ import annotations

import itertools

import torch

from torsh_trainer.comm.base import Communicator
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.state import local_optimizer
from torsh_trainer.testing import reference
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.compare import FP32_ADAM, same_tensors
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome

_SCENARIO = Scenario(optimizer="adamw")


def check_zero1(pool: RankPool, whole: Strategy, parts: Strategy) -> None:
    """Asserts that ``parts`` ends where ``whole`` does, bit for bit, and plain PyTorch nearly.

    And that of the optimizer's state, which every rank has under ``whole``, each has another part.
    """
    expected = pool.run(_train, whole, _SCENARIO)
    found = pool.run(_train, parts, _SCENARIO)
    plain = reference.train(_SCENARIO, pool.world_size)
    everything = expected[0][1]
    assert all(held == everything for _, held in expected)
    assert all(held for _, held in found), "every rank has a part"
    assert set.union(*(held for _, held in found)) == everything
    for (_, one), (_, other) in itertools.combinations(found, 2):
        assert not one & other
    for outcome, _ in found:
        for name, value in expected[0][0].parameters.items():
            assert torch.equal(outcome.parameters[name], value), name
        bound = FP32_ADAM.parameters
        same_tensors(outcome.parameters, plain.parameters, bound, "parameter")


def _train(
    comm: Communicator, strategy: Strategy, scenario: Scenario
) -> tuple[TrainingOutcome, set[str]]:
    """What training leaves, and for which parameters this rank had the optimizer's state."""
    driver = Driver(comm, strategy, scenario)
    engine, outcome = driver.engine, TrainingOutcome()
    for number in range(scenario.data.steps):
        driver.step(number, outcome)
    local = [local_optimizer(optimizer) for optimizer in engine.optimizers.values()]
    held = {id(parameter) for optimizer in local for parameter in optimizer.state}
    names = {name for name, p in engine.model.named_parameters() if id(p) in held}
    return driver.finish(outcome), names
