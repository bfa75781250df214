"""The scale follows torch.amp.GradScaler, overflow by overflow."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from torsh_trainer.optim.loss_scaling import LossScaler
from torsh_trainer.optim.precision import LossScaling

STEPS = 300


def overflows(seed: int, share: float) -> list[bool]:
    chance = random.Random(seed)
    return [chance.random() < share for _ in range(STEPS)]


def torchs(options: LossScaling, pattern: list[bool]) -> list[float]:
    """The scales of a GradScaler whose optimizer meets infinities as ``pattern`` says."""
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=options.initial_scale,
        growth_factor=options.growth_factor,
        backoff_factor=options.backoff_factor,
        growth_interval=options.growth_interval,
    )
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for overflow in pattern:
        loss = scaler.scale(weight.sum())
        loss.backward()
        if overflow:
            weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def ours(options: LossScaling, pattern: list[bool]) -> list[float]:
    scaler = LossScaler(options)
    scales = []
    for overflow in pattern:
        scaler.update(found_nonfinite=overflow)
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("interval", [1, 3, 20])
def test_the_scale_equals_grad_scalers(seed: int, share: float, interval: int) -> None:
    options = LossScaling(growth_interval=interval, min_scale=1e-37)
    pattern = overflows(seed, share)
    assert ours(options, pattern) == torchs(options, pattern)


def test_it_stops_growing_at_the_largest_float32_as_grad_scaler_does() -> None:
    options = LossScaling(initial_scale=2.0**120, growth_interval=1)
    pattern = [False] * 20
    assert ours(options, pattern) == torchs(options, pattern)


def test_other_factors_agree_to_float32() -> None:
    options = LossScaling(growth_factor=1.7, backoff_factor=0.3, growth_interval=4, min_scale=1e-37)
    pattern = overflows(5, 0.15)
    assert ours(options, pattern) == pytest.approx(torchs(options, pattern), rel=1e-4)


def test_the_floor_holds() -> None:
    scaler = LossScaler(LossScaling(initial_scale=8.0, min_scale=2.0))
    scales = []
    for _ in range(5):
        scales.append(scaler.scale)
        scaler.update(found_nonfinite=True)
    assert scales == [8.0, 4.0, 2.0, 2.0, 2.0]


def test_an_overflow_never_raises_a_scale_that_began_below_the_floor() -> None:
    assert ours(LossScaling(initial_scale=0.5, min_scale=1.0), [True]) == [0.5]


class DeepSpeeds:
    """The published rule of DeepSpeed's DynamicLossScaler (runtime/fp16/loss_scaler.py)."""

    def __init__(self, scale: float, window: int, hysteresis: int, minimum: float) -> None:
        self.scale, self.window, self.minimum = scale, window, minimum
        self.full = self.left = hysteresis
        self.step, self.last_overflow = 0, -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.full == 1 or self.left == 1:
                self.scale = max(self.scale / 2.0, self.minimum)
            else:
                self.left -= 1
            self.last_overflow = self.step
        elif (self.step - self.last_overflow) % self.window == 0:
            self.left = self.full
            self.scale *= 2.0
        self.step += 1


@pytest.mark.parametrize("hysteresis", [1, 2, 4])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_hysteresis_is_deepspeeds(hysteresis: int, share: float) -> None:
    options = LossScaling(growth_interval=5, hysteresis=hysteresis)
    theirs = DeepSpeeds(options.initial_scale, 5, hysteresis, options.min_scale)
    pattern = overflows(hysteresis, share)
    scales = []
    for overflow in pattern:
        theirs.update(overflow)
        scales.append(theirs.scale)
    assert ours(options, pattern) == scales
    assert len(set(scales)) > 2


def test_a_fixed_scale_never_moves() -> None:
    pattern = overflows(0, 0.5)
    assert ours(LossScaling(scale=128.0, growth_interval=1), pattern) == [128.0] * STEPS


def test_it_goes_on_from_its_state() -> None:
    options = LossScaling(growth_interval=7, hysteresis=3)
    pattern = overflows(9, 0.2)
    first = LossScaler(options)
    for overflow in pattern[:100]:
        first.update(found_nonfinite=overflow)
    second = LossScaler(options)
    second.load_state_dict(first.state_dict())
    assert second.scale == first.scale
    scales = []
    for overflow in pattern[100:]:
        second.update(found_nonfinite=overflow)
        scales.append(second.scale)
    assert scales == ours(options, pattern)[100:]


def test_a_fixed_scale_is_not_overridden_by_a_checkpoint() -> None:
    dynamic = LossScaler(LossScaling())
    fixed = LossScaler(LossScaling(scale=4.0))
    fixed.load_state_dict(dynamic.state_dict())
    assert fixed.scale == 4.0


def test_a_delayed_growth_comes_later_after_the_start_and_after_an_overflow():
    scaler = LossScaler(LossScaling(initial_scale=8.0, growth_interval=2, growth_delay=1))
    scales = []
    for overflow in (False, False, False, False, False, True, False, False, False):
        scaler.update(found_nonfinite=overflow)
        scales.append(scaler.scale)
    assert scales == [8, 8, 16, 16, 32, 16, 16, 16, 32]


def test_the_step_at_which_a_scale_grows_may_be_divided_by_what_it_grows_to():
    plain = LossScaler(LossScaling(initial_scale=8.0, growth_interval=2))
    grown = LossScaler(LossScaling(initial_scale=8.0, growth_interval=2, divide_by_grown=True))
    fixed = LossScaler(LossScaling(scale=8.0, growth_interval=1, divide_by_grown=True))
    divisors = []
    for _ in range(3):
        divisors.append((plain.divisor, grown.divisor, fixed.divisor))
        for scaler in (plain, grown, fixed):
            scaler.update(found_nonfinite=False)
    assert divisors == [(8, 8, 8), (8, 16, 8), (16, 16, 8)]
