"""What plain PyTorch trains trains here with the same result, or is refused by name."""

from __future__ import annotations

import pytest
from torsh_trainer_horovod import Horovod

from torsh_trainer.testing.odd import (
    GRADIENTS,
    HOOKS,
    MEMORY,
    OVERLAPS,
    Kind,
    OddTask,
    check_plain,
    check_refused,
    train_odd,
)
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyData

SCENARIOS = [Scenario(data=TinyData(accumulate=count)) for count in (1, 2)]
scenarios = pytest.mark.parametrize("scenario", SCENARIOS, ids=["once", "accumulated"])


@pytest.mark.matrix(26)
@scenarios
@pytest.mark.parametrize("kind", [*HOOKS, *MEMORY, *OVERLAPS, *GRADIENTS])
def test_it_trains_as_in_plain_pytorch(kind: Kind, scenario: Scenario) -> None:
    check_plain(shared_pool(2), Horovod(), kind, scenario)


@scenarios
@pytest.mark.parametrize("kind", ["repeated", "repeated_within"])
@pytest.mark.parametrize(
    "strategy", [Horovod(), Horovod(groups=2), Horovod(find_unused_parameters=True)], ids=repr
)
def test_a_gradient_that_comes_twice_is_sent_at_the_end_of_its_backward(
    strategy: Horovod, kind: Kind, scenario: Scenario
) -> None:
    check_plain(shared_pool(2), strategy, kind, scenario)


@scenarios
def test_one_that_comes_twice_in_a_later_step_is_refused_there(scenario: Scenario) -> None:
    words = "added again", "use_reentrant=False"
    check_refused(shared_pool(2), Horovod(), "repeated_later", *words, scenario=scenario)


def test_a_hook_on_an_accumulated_gradient_is_refused() -> None:
    check_refused(shared_pool(2), Horovod(), "accumulated", "'head.weight'", "register_hook")


def test_on_one_process_it_is_called_as_in_plain_pytorch() -> None:
    check_plain(shared_pool(1), Horovod(), "accumulated", SCENARIOS[1])


@pytest.mark.parametrize(
    "strategy", [Horovod(gradient_predivide_factor=2.0), Horovod(compression="fp16")], ids=repr
)
def test_a_hook_is_refused_where_it_would_see_another_gradient(strategy: Horovod) -> None:
    check_refused(shared_pool(2), strategy, "clamp", "'head.weight'", "number of processes")


def test_a_transposed_parameter_travels_in_fp16_too() -> None:
    strategy = Horovod(compression="fp16")
    for found in shared_pool(2).run(train_odd, strategy, Scenario(), OddTask("transposed")):
        assert not isinstance(found, str), found
