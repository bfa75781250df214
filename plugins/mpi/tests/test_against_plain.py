"""What plain PyTorch trains trains over MPI with the same result, or is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torsh_trainer.strategies.builtin import MPI
from torsh_trainer.testing.odd import (
    GRADIENTS,
    HOOKS,
    MEMORY,
    OVERLAPS,
    Kind,
    check_plain,
    check_refused,
)
from torsh_trainer.testing.ranks import OPTIONS, shared_pool
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyData

OVER_MPI = replace(OPTIONS, backend="mpi")
SCENARIOS = [Scenario(data=TinyData(accumulate=count)) for count in (1, 2)]
scenarios = pytest.mark.parametrize("scenario", SCENARIOS, ids=["once", "accumulated"])


@pytest.mark.matrix(26)
@scenarios
@pytest.mark.parametrize("kind", [*HOOKS, *MEMORY, *GRADIENTS, "repeated", "repeated_within"])
@pytest.mark.parametrize("zero1", [False, True])
def test_it_trains_as_in_plain_pytorch(zero1: bool, kind: Kind, scenario: Scenario) -> None:
    check_plain(shared_pool(2, options=OVER_MPI), MPI(zero1=zero1), kind, scenario)


@pytest.mark.parametrize("kind", OVERLAPS)
def test_parameters_in_the_same_memory_train_whole_and_are_refused_where_they_are_cut(
    kind: Kind,
) -> None:
    check_plain(shared_pool(2, options=OVER_MPI), MPI(), kind)
    words = "strategy.zero1=true", "'blocks.0.linear.bias' and 'blocks.1.linear.bias'"
    check_refused(shared_pool(2, options=OVER_MPI), MPI(zero1=True), kind, *words)


def test_a_hook_on_an_accumulated_gradient_is_refused() -> None:
    pool = shared_pool(2, options=OVER_MPI)
    check_refused(pool, MPI(), "accumulated", "'head.weight'", "register_hook")
