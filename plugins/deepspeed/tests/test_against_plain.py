"""What plain PyTorch trains trains here with the same result, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torsh_trainer_deepspeed import DeepSpeed

from torsh_trainer.testing.odd import (
    GRADIENTS,
    HOOKS,
    MEMORY,
    OVERLAPS,
    REPEATS,
    WRITES,
    Kind,
    check_plain,
    check_refused,
)
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyData

SCENARIOS = [Scenario(data=TinyData(accumulate=count)) for count in (1, 2)]
scenarios = pytest.mark.parametrize("scenario", SCENARIOS, ids=["once", "accumulated"])
BEFORE: dict[str, Any] = {"prescale_gradients": True}


@pytest.mark.matrix(8)
@scenarios
@pytest.mark.parametrize("kind", [*HOOKS, *MEMORY])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_and_layouts_in_memory_train_as_in_plain_pytorch(
    stage: int, kind: Kind, scenario: Scenario
) -> None:
    check_plain(shared_pool(2), DeepSpeed(stage=stage), kind, scenario)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_hook_sees_the_same_where_the_file_says_how_the_mean_is_divided(stage: int) -> None:
    check_plain(
        shared_pool(2),
        DeepSpeed(stage=stage, reduce_scatter=False, extra=BEFORE),
        "clamp",
        SCENARIOS[1],
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_hook_sees_the_same_where_the_optimizer_is_offloaded(stage: int) -> None:
    strategy = DeepSpeed(stage=stage, offload_optimizer="cpu")
    check_plain(shared_pool(2), strategy, "clamp", SCENARIOS[1])


def test_a_hook_is_refused_where_it_would_see_another_gradient() -> None:
    strategy = DeepSpeed(stage=0, extra=BEFORE)
    check_refused(shared_pool(2), strategy, "clamp", "'head.weight'", "prescale_gradients")


@pytest.mark.matrix(10)
@scenarios
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_loss_that_takes_a_gradient_trains_as_in_plain_pytorch(
    stage: int, kind: Kind, scenario: Scenario
) -> None:
    check_plain(shared_pool(2), DeepSpeed(stage=stage), kind, scenario)


@pytest.mark.parametrize("kind", GRADIENTS)
def test_stage_3_refuses_it_in_the_first_step(kind: Kind) -> None:
    check_refused(
        shared_pool(2), DeepSpeed(stage=3), kind, "torch.autograd.grad", "strategy.stage=2"
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_hook_on_an_accumulated_gradient_is_refused(stage: int) -> None:
    check_refused(
        shared_pool(2), DeepSpeed(stage=stage), "accumulated", "'head.weight'", "register_hook"
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_so_it_is_on_one_process_where_gradients_leave_in_each_micro_batch(stage: int) -> None:
    strategy = DeepSpeed(stage=stage)
    check_refused(shared_pool(1), strategy, "accumulated", "'head.weight'", scenario=SCENARIOS[1])


@pytest.mark.parametrize("stage", [0, 1])
def test_on_one_process_it_is_called_as_in_plain_pytorch(stage: int) -> None:
    check_plain(shared_pool(1), DeepSpeed(stage=stage), "accumulated", SCENARIOS[1])


@pytest.mark.parametrize("kind", OVERLAPS)
def test_parameters_in_the_same_memory_train_at_stage_0(kind: Kind) -> None:
    check_plain(shared_pool(2), DeepSpeed(stage=0), kind)


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_in_the_same_memory_are_refused_where_they_are_cut(
    stage: int, kind: Kind
) -> None:
    names = "'blocks.0.linear.bias' and 'blocks.1.linear.bias'"
    check_refused(shared_pool(2), DeepSpeed(stage=stage), kind, names)


@scenarios
@pytest.mark.parametrize("kind", REPEATS)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_comes_twice_trains_where_it_leaves_after_the_backward(
    stage: int, kind: Kind, scenario: Scenario
) -> None:
    check_plain(shared_pool(2), DeepSpeed(stage=stage), kind, scenario)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("kind", REPEATS)
@pytest.mark.parametrize(
    "strategy",
    [
        DeepSpeed(stage=1, overlap_comm=True),
        DeepSpeed(stage=2),
        DeepSpeed(stage=2, reduce_bucket_size=16),
        DeepSpeed(stage=3),
        DeepSpeed(stage=3, reduce_bucket_size=16),
    ],
    ids=["overlap", "2", "2 small", "3", "3 small"],
)
def test_it_is_refused_where_it_leaves_during_the_backward(strategy: DeepSpeed, kind: Kind) -> None:
    words = "use_reentrant=False", "added several times"
    check_refused(shared_pool(2), strategy, kind, *words, scenario=SCENARIOS[1])


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_that_bounds_its_weights_is_refused_from_stage_1_on(
    kind: Kind, stage: int
) -> None:
    words = "strategy=deepspeed cannot honour", "'blocks.0.linear.weight'", "copies of its own"
    check_refused(shared_pool(2), DeepSpeed(stage=stage), kind, *words)


@pytest.mark.parametrize("kind", WRITES)
def test_such_a_forward_trains_at_stage_0(kind: Kind) -> None:
    check_plain(shared_pool(2), DeepSpeed(stage=0), kind)
