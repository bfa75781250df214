"""Compression by itself: what is chosen, how it is written down, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torsh_trainer.comm.compression import (
    BF16,
    FP16,
    CompressionAlgorithm,
    CompressorMemory,
    GradientCompressor,
    GradientReducer,
    Int4,
    Int8,
    NoCompression,
    NoMemory,
    OneBit,
    PowerSGD,
    RandomK,
    Residual,
    SignSGD,
    Threshold,
    TopK,
)
from torsh_trainer.comm.compression.method import Draw, are_finite
from torsh_trainer.comm.compression.quantised import Format
from torsh_trainer.comm.compression.reducer import Slot, share_of
from torsh_trainer.comm.compression.selection import above, largest
from torsh_trainer.comm.compression.signs import bytes_for_bits, pack, unpack
from torsh_trainer.comm.compression.sparse import count_kept, subset
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError

SIZE = 1_200_000  # so that a thousandth of it is found by a sample


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- the largest elements --------------------------------------------------------------------------

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "heavy tails": lambda x: x**5,
    "few differ from zero": lambda x: torch.where(x.abs() > 2.9, x, 0.0),
    "scattered scales": lambda x: x * 10.0 ** (6 * torch.rand(len(x), generator=generator(9)) - 3),
    "sorted": lambda x: x.sort().values,
    "all alike": torch.ones_like,
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_the_threshold_of_a_sample_finds_what_an_exact_top_k_finds(
    shape: str, ratio: float
) -> None:
    values = SHAPES[shape](torch.randn(SIZE, generator=generator(1)))
    count = count_kept(ratio, SIZE)
    places = largest(values, count, generator(2))
    exact = torch.topk(values.abs(), count).values
    assert places.unique().numel() == places.numel() <= count
    # Of equal magnitudes either will do, and zeros need not be sent at all.
    found = values.abs()[places].sort(descending=True).values
    assert torch.equal(found, exact[: len(found)])
    assert not exact[len(found) :].any()


def test_a_sample_that_misleads_is_found_out() -> None:
    values = torch.zeros(SIZE)
    values[:10] = torch.arange(1.0, 11.0)  # which no sample of a few thousand need meet
    assert sorted(largest(values, count_kept(0.01, SIZE), generator()).tolist()) == list(range(10))


def test_a_threshold_finds_every_place_at_or_above_it() -> None:
    values = torch.randn(SIZE, generator=generator(3))
    expected = (values.abs() >= 1.5).nonzero().view(-1)
    assert torch.equal(above(values, 1.5), expected)
    assert above(torch.zeros(SIZE), 0.0).numel() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_value_that_is_not_finite_is_noticed(bad: float) -> None:
    values = torch.randn(1000)
    assert are_finite([torch.ones(3), values])
    values[500] = bad
    assert not are_finite([torch.ones(3), values])


# -- random places ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [(1000, 1), (1000, 7), (1000, 400), (5, 5), (1, 1)])
def test_every_place_is_drawn_as_often_as_any_other(size: int, count: int) -> None:
    draws, numbers = 4000, generator(4)
    seen = torch.zeros(size)
    for _ in range(draws):
        places = subset(size, count, numbers)
        assert places.unique().numel() == places.numel() == count
        seen[places] += 1
    p = count / size
    # Binomial; of `size` places none lies beyond 6 standard deviations but by a chance of 1e-6.
    assert ((seen / draws - p).abs() <= 6 * math.sqrt(p * (1 - p) / draws) + 1 / draws).all()


def test_draws_are_a_function_of_seed_step_and_name_alone() -> None:
    def drawn(seed: int, step: int, *words: Any) -> list[float]:
        draw = Draw(seed)
        draw.step = step
        return torch.rand(3, generator=draw.generator(torch.device("cpu"), *words)).tolist()

    assert drawn(1, 2, "a", "b") == drawn(1, 2, "a", "b")
    others = [drawn(2, 2, "a", "b"), drawn(1, 3, "a", "b"), drawn(1, 2, "a", "c")]
    assert drawn(1, 2, "a", "b") not in others


# -- what is on the wire ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 1001])
def test_signs_take_a_bit_and_come_back(size: int) -> None:
    flags = torch.rand(size, generator=generator(5)) < 0.5
    packed = torch.empty(bytes_for_bits(size), dtype=torch.uint8)
    pack(flags, packed)
    assert packed.numel() == math.ceil(size / 8)
    assert torch.equal(unpack(packed, slice(0, size)).bool(), flags)
    for begin, end in ((0, 1), (size // 3, size // 2 + 1), (size - 1, size)):
        assert torch.equal(unpack(packed, slice(begin, end)).bool(), flags[begin:end])


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_whole_numbers_come_back_as_the_nearest_levels(size: int, bits: int, levels: int) -> None:
    form = Format(bits, 64, "nearest")
    values = torch.randn(size, generator=generator(6)) * 10.0
    payload = torch.empty(form.payload_bytes(size), dtype=torch.uint8)
    sent = form.encode(values, payload, None)
    blocks = math.ceil(size / min(64, size))
    assert payload.numel() == 4 * blocks + math.ceil(size * bits / 8)
    assert torch.equal(form.decode(payload, size), sent)
    for begin in range(0, size, 64):
        block = values[begin : begin + 64]
        step = float(block.abs().max()) / levels
        assert (sent[begin : begin + 64] - block).abs().max() <= step / 2 * (1 + 1e-5)


def test_what_nearest_levels_leave_over_is_exact() -> None:
    """value - sent is a floating-point number wherever sent is the nearest level (Sterbenz)."""
    values = torch.randn(10_000, generator=generator(7))
    for bits in (8, 4):
        form = Format(bits, 128, "nearest")
        payload = torch.empty(form.payload_bytes(len(values)), dtype=torch.uint8)
        sent = form.encode(values, payload, None)
        assert torch.equal((values - sent).double(), values.double() - sent.double())


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_is_right_in_expectation(bits: int) -> None:
    values, draws = torch.randn(512, generator=generator(8)), 2000
    mean = {}
    for rounding in ("stochastic", "nearest"):
        form = Format(bits, 512, rounding)
        payload = torch.empty(form.payload_bytes(512), dtype=torch.uint8)
        numbers = generator(9)
        total = sum(form.encode(values, payload, numbers).double() for _ in range(draws))
        mean[rounding] = total / draws
    step = float(values.abs().max()) / form.levels
    # A value between two levels varies by at most step^2 / 4; 6 standard deviations of the mean.
    bound = 6 * step / 2 / math.sqrt(draws) + 1e-6
    assert (mean["stochastic"] - values).abs().max() <= bound
    assert (mean["nearest"] - values).abs().max() > bound, "the bound means nothing"


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-45])
def test_blocks_of_next_to_nothing_are_zeros_and_not_nan(value: float) -> None:
    form = Format(8, 64, "nearest")
    payload = torch.empty(form.payload_bytes(100), dtype=torch.uint8)
    assert not form.encode(torch.full((100,), value), payload, None).any()


def test_nan_is_not_hidden_by_whole_numbers() -> None:
    form = Format(8, 64, "nearest")
    values = torch.randn(100)
    values[3] = math.nan
    payload = torch.empty(form.payload_bytes(100), dtype=torch.uint8)
    form.encode(values, payload, None)
    assert form.decode(payload, 100)[:64].isnan().any()


# -- residuals on another number of ranks ----------------------------------------------------------


@pytest.mark.parametrize("before", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 6, 8])
def test_the_mean_of_what_is_owed_survives_a_change_of_ranks(before: int, after: int) -> None:
    owed = torch.randn(before, 5, generator=generator(before), dtype=torch.float64)
    taken = [
        sum(factor * owed[old] for old, factor in share_of(rank, after, before))
        for rank in range(after)
    ]
    assert torch.allclose(torch.stack(taken).mean(0), owed.mean(0))
    if before == after:
        assert [share_of(rank, after, before) for rank in range(after)] == [
            [(rank, 1.0)] for rank in range(after)
        ]


# -- knobs -----------------------------------------------------------------------------------------

BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: TopK(0.0), r"compression.ratio=0.0 is not in \(0, 1\]"),
    (lambda: TopK(1.5), r"compression.ratio=1.5 is not in \(0, 1\]"),
    (lambda: TopK(math.nan), "compression.ratio=nan"),
    (lambda: RandomK(-0.1), r"compression.ratio=-0.1 is not in \(0, 1\]"),
    (lambda: Threshold(0.0), "compression.threshold=0.0 is not a positive number"),
    (lambda: Threshold(math.inf), "compression.threshold=inf"),
    (lambda: TopK(memory="residul"), "compression.memory=residul is unknown; did you mean"),  # type: ignore[arg-type]
    (lambda: TopK(warmup_steps=-1), "compression.warmup_steps=-1 is below 0"),
    (lambda: TopK(min_size=-1), "compression.min_size=-1 is below 0"),
    (lambda: TopK(exclude="*.bias"), r"write compression.exclude=\[\*.bias\]"),  # type: ignore[arg-type]
    (lambda: Int8(block_size=0), "compression.block_size=0 is below 1"),
    (lambda: Int4(rounding="stocastic"), "did you mean 'stochastic'"),  # type: ignore[arg-type]
    (lambda: OneBit(block_size=0), "compression.block_size=0 is below 1"),
    (lambda: PowerSGD(rank=0), "compression.rank=0 is below 1"),
    (lambda: PowerSGD(min_compression_rate=0.0), "compression.min_compression_rate=0.0"),
]


@pytest.mark.parametrize(("made", "words"), BAD, ids=[words[:40] for _, words in BAD])
def test_a_knob_out_of_range_is_refused_by_name(made: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made()


def test_one_process_has_nothing_to_compress() -> None:
    with pytest.raises(ConfigError, match="one process sends no gradients"):
        GradientReducer(TopK(), {"a": torch.zeros(3)}, LocalCommunicator())


def test_slots_stand_in_a_row() -> None:
    assert Slot.row([("a", 3), ("b", 2)]) == [Slot("a", 0, 3), Slot("b", 3, 2)]


# -- the same in a chain of calls ------------------------------------------------------------------


def test_a_chain_of_calls_comes_to_the_same_knobs() -> None:
    made = GradientCompressor().algorithm(TopK(0.1)).memory(Residual())
    assert made.compression == TopK(ratio=0.1, memory="residual")
    same = GradientCompressor().algorithm(CompressionAlgorithm.TopK(0.1))
    assert same.memory(CompressorMemory.Residual).compression == made.compression
    assert made.memory(NoMemory()).compression == TopK(ratio=0.1, memory="none")
    assert made.compression.memory == "residual", "a call changes nothing but what it returns"
    more = made.warmup_steps(5).exclude("*.bias").compression
    assert more == TopK(ratio=0.1, warmup_steps=5, exclude=("*.bias",))
    assert GradientCompressor().compression == NoCompression()


def test_a_chain_without_an_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="without an algorithm"):
        GradientCompressor().memory(Residual())


def test_every_method_has_a_name_of_its_own_and_is_offered_in_the_chain() -> None:
    methods = (FP16, BF16, TopK, RandomK, Threshold, Int8, Int4, SignSGD, OneBit, PowerSGD)
    assert len({method.name for method in methods}) == len(methods)
    for method in methods:
        assert getattr(CompressionAlgorithm, method.__name__) is method
