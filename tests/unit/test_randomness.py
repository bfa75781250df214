"""Random numbers by sample: the rule, their distribution, and what is said where there are none."""

from __future__ import annotations

import logging
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer import Trainer
from torsh_trainer.data.batch import MicroBatch, Place, Samples
from torsh_trainer.data.sampler import ForwardKeys
from torsh_trainer.errors import ConfigError
from torsh_trainer.randomness import SampleDraws, draws_of
from torsh_trainer.randomness.layout import Layout, layout_of
from torsh_trainer.task import Task

CPU = torch.device("cpu")


def micro_batch(step: int = 0, first: int = 0, count: int = 64, seed: int = 5) -> MicroBatch:
    key = ForwardKeys(seed).of_step(step)
    return MicroBatch(None, 1.0, key, Place(0, 1, Samples(first, count, key)))


def draw(step: int, *, first: int = 0, count: int = 64, width: int = 512, times: int = 1) -> Tensor:
    """Masks of dropout 0.5 as 0 and 1, (times, samples, width)."""
    draws = SampleDraws(nn.Identity(), CPU)
    with draws.of(micro_batch(step, first, count)):
        return torch.stack([F.dropout(torch.ones(count, width)) for _ in range(times)]) / 2


@pytest.mark.parametrize(
    ("shape", "samples", "expected"),
    [
        ((8, 3), 8, Layout(8, (3,))),
        ((8,), 8, Layout(8, (1,))),
        ((8, 8), 8, Layout(8, (8,))),
        ((24, 5), 8, Layout(8, (3, 5))),
        ((1, 1, 1), 1, Layout(1, (1, 1))),
        ((5, 3), 8, Layout(0, (5, 3))),
        ((), 8, Layout(0, (1,))),
        ((5, 8, 3), 8, None),  # time before samples
        ((24, 8), 8, None),
        ((24,), 8, None),
        ((1,), 1, None),
    ],
)
def test_the_dimension_of_samples_is_the_first_and_a_doubtful_shape_is_left(
    shape, samples, expected
):
    assert layout_of(shape, samples) == expected


def test_what_only_some_models_leave_open_is_left_in_these():
    assert layout_of((8, 8, 3), 8, time_major=True) is None
    assert layout_of((16, 3), 8, parameters={(16, 3)}) is None


def chi_square(counts: Tensor) -> float:
    """Over all cells, with as many expected in each, in standard deviations from its mean."""
    expected = counts.double().mean()
    degrees = counts.numel() - 1
    found = float(((counts - expected) ** 2 / expected).sum())
    return (found - degrees) / math.sqrt(2 * degrees)


def test_masks_have_the_mean_and_the_variance_of_coins():
    drawn = torch.stack([draw(step, times=4) for step in range(8)])
    numbers = drawn.numel()
    assert abs(float(drawn.mean()) - 0.5) < 4 * 0.5 / math.sqrt(numbers)
    for dims, size in (((0, 1, 2), 8 * 4 * 64), ((3,), 512), ((0, 1, 3), 8 * 4 * 512)):
        means = drawn.mean(dims).flatten()
        spread = float(((means - 0.5) ** 2).mean()) * size / 0.25
        assert abs(spread - 1) < 5 * math.sqrt(2 / means.numel())


@pytest.mark.parametrize("axis", ["samples", "steps", "draws", "places"])
def test_masks_are_independent(axis):
    drawn = torch.stack([draw(step, times=8) for step in range(8)]).long()
    dim = {"steps": 0, "draws": 1, "samples": 2, "places": 3}[axis]
    for distance in (1, 2, 4):
        one = drawn.narrow(dim, 0, drawn.shape[dim] - distance)
        other = drawn.narrow(dim, distance, drawn.shape[dim] - distance)
        assert abs(chi_square(torch.bincount((2 * one + other).flatten(), minlength=4))) < 5


def test_words_fill_their_range_evenly():
    with SampleDraws(nn.Identity(), CPU).of(micro_batch()):
        uniform, normal = torch.rand(64, 1001), torch.randn(64, 1001)
        exponential = torch.empty(64, 1001).exponential_()
        whole = torch.randint(3, 19, (64, 1001))
    normal = torch.special.ndtr(normal)
    for drawn in (uniform, normal, 1 - torch.exp(-exponential)):
        assert float(drawn.min()) >= 0
        assert float(drawn.max()) <= 1
        assert abs(chi_square(torch.histc(drawn, 64, 0, 1))) < 5
    assert abs(chi_square(torch.bincount(whole.flatten() - 3, minlength=16))) < 5


def test_a_sample_draws_the_same_in_any_micro_batch_and_at_any_length():
    whole = draw(3, times=3)
    parts = torch.cat([draw(3, first=first, count=16, times=3) for first in range(0, 64, 16)], 1)
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    torch.testing.assert_close(draw(3, width=101, times=3), whole[..., :101], rtol=0, atol=0)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.75, 1.0])
def test_the_fused_dropout_of_accelerators_and_its_gradient_are_those_of_its_mask(p):
    x = torch.randn(64, 33, dtype=torch.float64, requires_grad=True)
    with SampleDraws(nn.Identity(), CPU).of(micro_batch()):
        y, mask = torch.native_dropout(x, p, train=True)
        y.sum().backward()
    scale = 0.0 if p == 1 else 1 / (1 - p)
    torch.testing.assert_close(y, x * mask * scale)
    torch.testing.assert_close(x.grad, mask.double() * scale)
    assert (
        abs(float(mask.double().mean()) - (1 - p))
        < 5 * math.sqrt(p * (1 - p) / mask.numel()) + 1e-9
    )


def test_outside_of_a_forward_and_with_a_generator_torch_draws():
    SampleDraws(nn.Identity(), CPU)
    torch.manual_seed(3)
    expected = torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(5), torch.rand(5, generator=expected))
    torch.manual_seed(3)
    with draws_of("by_micro_batch", nn.Identity(), CPU).of(micro_batch()._replace(rng_key=9)):
        assert torch.equal(torch.rand(5), torch.rand(5, generator=torch.manual_seed(9)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.memory(x)[0]


class Foreign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.poisson(x.abs())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Recurrent(), ["bernoulli_ in memory (LSTM) cannot be drawn by sample"]),
        (Foreign(), ["the forward draws from random, which no key reaches"]),
        (Chosen(), ["rrelu_with_noise in inner (RReLU)", "poisson in Chosen"]),
    ],
)
def test_what_has_no_key_draws_by_micro_batch_and_is_named_once(model, words, caplog):
    draws = SampleDraws(model, CPU)
    x = torch.randn(8, 8, 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with draws.of(micro_batch(count=8)):
                model(x)
    for record, word in zip(caplog.records, words, strict=True):
        assert word in record.getMessage()


def test_another_word_than_the_two_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.randomness=by_batch is unknown"):
        Trainer(task=Task(), max_steps=1, randomness="by_batch")
