"""Random numbers by sample: the rule, their distribution, and what is said where there are none."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer import Trainer
from torsh_trainer.data.batch import MicroBatch, MicroBatchPlace, Samples
from torsh_trainer.data.sampler import ForwardKeys
from torsh_trainer.errors import ConfigError
from torsh_trainer.randomness import SampleDraws, draws_of, kernels
from torsh_trainer.randomness.layout import Layout, layout_of
from torsh_trainer.tasks.base import Task

CPU = torch.device("cpu")


def micro_batch(step: int = 0, first: int = 0, count: int = 64, seed: int = 5) -> MicroBatch:
    key = ForwardKeys(seed).of_step(step)
    return MicroBatch(None, 1.0, key, MicroBatchPlace(0, 1, Samples(first, count, key)))


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


def test_samples_come_second_where_a_model_puts_time_first():
    assert layout_of((5, 8, 3), 8, time_major=True) == Layout(8, (5, 1, 3), time_first=True)
    assert layout_of((5, 8, 8), 8, time_major=True) is None
    assert layout_of((16, 8, 3), 8, time_major=True) is None


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


@pytest.mark.parametrize(("one", "other"), [(0, 2), (0, 3), (1, 2), (2, 3), (0, 1)])
def test_no_four_masks_add_up(one, other):
    """Those of two steps and two samples, say: what keys of sums alone would leave."""
    drawn = torch.stack([draw(step, times=8) for step in range(8)]).long()

    def pairs(masks: Tensor, dim: int) -> Tensor:
        size = masks.shape[dim]
        return masks.narrow(dim, 0, size - 1) ^ masks.narrow(dim, 1, size - 1)

    odd = pairs(pairs(drawn, one), other)
    assert abs(chi_square(torch.bincount(odd.flatten(), minlength=2))) < 5


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


class Of(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Memory(nn.Module):
    """A recurrent layer, which gives its states."""

    def __init__(self, kind: type[nn.RNNBase], **knobs: Any) -> None:
        super().__init__()
        self.memory = kind(8, 8, num_layers=3, dropout=0.5, **knobs)

    def forward(self, x: Tensor) -> Tensor:
        if self.memory.batch_first:
            return self.memory(x)[0]
        return self.memory(x.transpose(0, 1))[0].transpose(0, 1)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Packed(Memory):
    def forward(self, x: Tensor) -> Tensor:
        lengths = range(len(x), 0, -1)
        packed = nn.utils.rnn.pack_padded_sequence(x, list(lengths), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.memory(packed)[0], batch_first=True)[0]


PACKED = Packed(nn.LSTM, batch_first=True)


def attend(x: Tensor) -> Tensor:
    x = x.unsqueeze(1)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.4).squeeze(1)


distributions = torch.distributions
KEYED = {
    "LSTM": lambda: Memory(nn.LSTM, batch_first=True, bidirectional=True),
    "GRU": lambda: Memory(nn.GRU, batch_first=True),
    "RNN with time first": lambda: Memory(nn.RNN),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True),
    "encoder layer with time first": TimeFirst,
    "attention": lambda: Of(attend),
    "bf16": lambda: Of(lambda x: F.dropout(x.bfloat16(), 0.3).float()),
    "channels": lambda: Of(lambda x: F.dropout3d(x[..., None, None], 0.5)[..., 0, 0]),
    "features": lambda: nn.FeatureAlphaDropout(0.3),
    "RReLU": nn.RReLU,
    "RReLU in place": lambda: Of(lambda x: F.rrelu_(x.clone(), training=True)),
    "gumbel": lambda: Of(lambda x: F.gumbel_softmax(x, hard=True)),
    "multinomial": lambda: Of(lambda x: torch.multinomial(x[:, 0].exp(), 3).float()),
    "normal": lambda: Of(lambda x: torch.normal(x, 2.0) + torch.normal(0.0, 1.0, x.shape)),
    "truncated": lambda: Of(lambda x: nn.init.trunc_normal_(torch.empty_like(x))),
    "randint": lambda: Of(lambda x: torch.randint_like(x, 5)),
    "geometric": lambda: Of(lambda x: torch.empty_like(x).geometric_(0.3)),
    "cauchy": lambda: Of(lambda x: torch.empty_like(x).cauchy_()),
    "log normal": lambda: Of(lambda x: torch.empty_like(x).log_normal_()),
    "categorical": lambda: Of(lambda x: distributions.Categorical(logits=x).sample().float()),
    "Bernoulli": lambda: Of(lambda x: distributions.Bernoulli(logits=x).sample()),
    "Laplace": lambda: Of(lambda x: distributions.Laplace(x, torch.ones_like(x)).rsample()),
    "many normal": lambda: Of(
        lambda x: distributions.MultivariateNormal(x, torch.eye(8)).rsample()
    ),
}


def cut_in(model: nn.Module, x: Tensor, size: int) -> Tensor:
    """Outputs of a step in micro-batches of ``size`` samples."""
    draws, key, outputs = SampleDraws(model, CPU), ForwardKeys(5).of_step(3), []
    for number, part in enumerate(x.split(size)):
        place = MicroBatchPlace(number, len(x) // size, Samples(number * size, len(part), key))
        with draws.of(MicroBatch(None, 1.0, ForwardKeys.of_micro_batch(key, number), place)):
            outputs.append(model(part))
    return torch.cat(outputs)


@pytest.mark.parametrize("kind", KEYED)
def test_a_sample_draws_the_same_whatever_it_is_drawn_by(kind, caplog):
    model, x = KEYED[kind](), torch.randn(12, 5, 8)
    whole = cut_in(model, x, 12)
    assert float(whole.detach().std()) > 0
    for size in (6, 4, 1):
        torch.testing.assert_close(cut_in(model, x, size), whole, rtol=1e-5, atol=1e-5)
    assert not caplog.records


def quantiles(kind: str, drawn: Tensor) -> Tensor:
    """Uniform numbers, where ``drawn`` is distributed as ``kind`` says."""
    if kind == "cauchy":
        return drawn.double().atan() / torch.pi + 0.5
    if kind == "log normal":
        return torch.special.ndtr((drawn.double().log() - 1) / 2)
    return (drawn - 0.125) / (1 / 3 - 0.125)


@pytest.mark.parametrize("kind", ["cauchy", "log normal", "RReLU"])
def test_what_torch_has_further_distributions_for_is_distributed_so(kind):
    drawn = -cut_in(KEYED[kind](), -torch.ones(64, 1001), 64)
    drawn = drawn if kind == "RReLU" else -drawn
    assert abs(chi_square(torch.histc(quantiles(kind, drawn).float(), 64, 0, 1))) < 5


def test_geometric_numbers_fall_by_a_factor():
    drawn = cut_in(KEYED["geometric"](), torch.ones(64, 1001), 64).long()
    counts = torch.bincount(drawn.flatten())
    assert counts[0] == 0
    for count, following in zip(counts[1:6].tolist(), counts[2:7].tolist(), strict=True):
        assert abs(following / count - 0.7) < 5 / math.sqrt(following)


def test_the_gradient_of_a_leaky_unit_has_the_slopes_that_were_drawn():
    x = torch.randn(8, 33, requires_grad=True)
    with SampleDraws(nn.RReLU(), CPU).of(micro_batch(count=8)):
        y = F.rrelu(x, training=True)
        y.sum().backward()
    torch.testing.assert_close(x.grad, (y / x).detach())


class Foreign(nn.Module):
    """Draws from Python from the second forward on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * random.random() if self.calls > 1 else x


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Of(lambda x: x[torch.randperm(len(x))])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.poisson(x.abs())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (PACKED, ["bernoulli_ in memory (LSTM) cannot be drawn by"]),
        (nn.MultiheadAttention(8, 2, 0.3), ["bernoulli_ in MultiheadAttention cannot be drawn by"]),
        (Foreign(), ["the forward draws from random, which no key reaches"]),
        (Chosen(), ["randperm.generator_out in inner (Of)", "poisson in Chosen"]),
    ],
)
def test_what_has_no_key_draws_by_micro_batch_and_is_named_once(model, words, caplog):
    draws = SampleDraws(model, CPU)
    x = torch.randn(8, 8, 8)
    given = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x,)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            with draws.of(micro_batch(count=8)):
                model(*given)
    for record, word in zip(caplog.records, words, strict=True):
        assert word in record.getMessage()


def test_a_process_that_has_compiled_names_the_same(caplog, monkeypatch):
    monkeypatch.setattr(kernels, "_asks", torch.compiler.disable(kernels._ask))
    x = torch.randn(8, 8, 8)
    with caplog.at_level(logging.WARNING), SampleDraws(PACKED, CPU).of(micro_batch(count=8)):
        PACKED(x)
    (record,) = caplog.records
    assert "bernoulli_ in memory (LSTM) cannot be drawn by" in record.getMessage()


@pytest.mark.parametrize("rows", [48, 24], ids=["a multiple", "as many"])
def test_what_does_not_grow_with_the_samples_is_told_once_they_are_fewer(rows, caplog):
    model = Of(lambda x: x @ torch.randn(rows, 7).T)
    for first, count in ((0, 24), (24, 8), (32, 4)):
        with SampleDraws(model, CPU).of(micro_batch(first=first, count=count)):
            model(torch.randn(count, 7))
    assert not caplog.records
    draws = SampleDraws(model, CPU)
    for first, count in ((0, 24), (24, 8), (32, 4)):
        with draws.of(micro_batch(first=first, count=count)):
            model(torch.randn(count, 7))
    (record,) = caplog.records
    assert f"normal_ in Of draws in the shape ({rows}, 7) for 24 samples and" in record.getMessage()


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Dropout(), nn.Flatten(0, 1), nn.Dropout()),
        Of(lambda x: x * torch.rand(8) + torch.rand(())),
        Memory(nn.LSTM),
        TimeFirst(),
    ],
    ids=["dropout", "for all samples", "recurrent", "time first"],
)
def test_a_shorter_last_batch_of_what_is_known_says_nothing(model, caplog):
    draws = SampleDraws(model, CPU)
    for count in (6, 7, 5):
        with draws.of(micro_batch(count=count)):
            model(torch.randn(count, 3, 8))
    assert not caplog.records


def test_another_word_than_the_two_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.randomness=by_batch is unknown"):
        Trainer(task=Task(), max_steps=1, randomness="by_batch")
