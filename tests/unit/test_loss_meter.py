"""Losses since the last report, beside plain sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torsh_trainer.training.loss_meter import LossMeter


def steps(count: int) -> list[tuple[tuple[Tensor, float], ...]]:
    generator = torch.Generator().manual_seed(count)
    losses = torch.rand(count, 2, generator=generator)
    weights = torch.randint(1, 9, (count, 2), generator=generator)
    return [
        tuple((loss, float(weight)) for loss, weight in zip(*pair, strict=True))
        for pair in zip(losses, weights, strict=True)
    ]


def test_the_sum_is_that_of_losses_times_weights() -> None:
    meter = LossMeter()
    for parts in steps(7):
        meter.add(parts, sum(weight for _, weight in parts))
    flat = [part for parts in steps(7) for part in parts]
    assert meter.weight == sum(weight for _, weight in flat)
    total, beside = meter.read(torch.tensor(2.5))
    assert total == pytest.approx(sum(float(loss) * weight for loss, weight in flat))
    assert beside == 2.5


@pytest.mark.parametrize("stop", range(8))
def test_a_save_in_between_changes_no_bit_of_it(stop: int) -> None:
    whole, saved = LossMeter(), LossMeter()
    for number, parts in enumerate(steps(8)):
        whole.add(parts, 1.0)
        saved.add(parts, 1.0)
        if number == stop:
            saved.collect()
            assert not saved.pending
    assert saved.read() == whole.read()


def test_what_weighs_nothing_may_be_no_number() -> None:
    meter = LossMeter()
    meter.add(((torch.tensor(3.0), 2.0), (torch.tensor(math.nan), 0.0)), 2.0)
    assert meter.read() == [6.0]


def test_after_a_report_it_begins_anew() -> None:
    meter = LossMeter()
    meter.add(steps(1)[0], 4.0)
    meter.collect()
    meter.clear()
    assert (meter.read(), meter.weight) == ([0.0], 0.0)
