"""What is not finite is named, and ends a run where that is asked for."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import TrainingError
from torsh_trainer.training.loss_meter import LossMeter
from torsh_trainer.training.nonfinite import SKIPPED_IN_A_ROW, NonfiniteGuard


def guard_of(action: Any, model: nn.Module | None = None) -> NonfiniteGuard:
    model = model or nn.Linear(2, 1)
    engine: Any = SimpleNamespace(model=model, state_dict=lambda: {"model": model.state_dict()})
    return NonfiniteGuard(action, engine, LocalCommunicator())


def losses_of(*values: float, weight: float = 1.0) -> LossMeter:
    losses = LossMeter()
    for value in values:
        losses.add(((torch.tensor(value), weight),), weight)
    return losses


@pytest.mark.parametrize("read", [True, False])
def test_the_first_step_whose_loss_is_not_finite_is_named(read: bool) -> None:
    losses, guard = losses_of(1.0, 2.0, math.inf, math.nan), guard_of("stop")
    check = partial(guard.check_mean, math.nan) if read else guard.check_pending
    with pytest.raises(TrainingError, match=r"not finite .*, first at step 9") as caught:
        check(losses, update=10)
    assert caught.value.facts["step"] == 9


@pytest.mark.parametrize("action", ["skip", "continue"])
def test_nothing_is_raised_where_it_is_not_to_stop_the_run(action: str) -> None:
    losses, guard = losses_of(math.nan), guard_of(action)
    guard.check_mean(math.nan, losses, update=1)
    guard.check_pending(losses, update=1)


def test_a_loss_that_weighs_nothing_may_be_no_number() -> None:
    guard_of("stop").check_pending(losses_of(math.nan, weight=0.0), update=1)


def test_skipping_for_ever_ends_the_run_unless_a_step_comes_between() -> None:
    guard = guard_of("skip")
    for step in range(1, SKIPPED_IN_A_ROW):
        guard.count_skipped(step)
    guard.skipped_in_a_row = 0
    for step in range(1, SKIPPED_IN_A_ROW):
        guard.count_skipped(step)
    with pytest.raises(TrainingError, match=f"up to step {SKIPPED_IN_A_ROW}"):
        guard.count_skipped(SKIPPED_IN_A_ROW)


def test_weights_are_looked_at_as_far_as_they_train(caplog) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[1].weight[0, 1] = math.inf
    with pytest.raises(TrainingError, match=r"not finite after step 4, first 1\.weight"):
        guard_of("stop", model).check_weights(4)
    guard_of("continue", model).check_weights(4)
    assert "first 1.weight" in caplog.text
    guard_of("continue", model).check_end(4)
    model[1].requires_grad_(False)
    guard_of("stop", model).check_weights(4)
