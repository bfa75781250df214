"""Compressed means on real ranks: what is sent and what is owed add up to the gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression import (
    BF16,
    FP16,
    Compressing,
    GradientCompressor,
    GradientReducer,
    Int4,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    Residual,
    SignSGD,
    Slot,
    Threshold,
    TopK,
    attach,
    with_compression,
)
from torsh_trainer.comm.compression.powersgd import LowRank
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.strategies.compressing import CompressedBuckets
from torsh_trainer.testing.ranks import shared_pool

SHAPES = {"a": (60, 40), "small": (7,), "b": (1001,), "c": (60, 40)}
METHODS: dict[str, Compressing] = {
    "fp16": FP16(memory="residual"),
    "bf16": BF16(memory="residual"),
    "topk": TopK(0.05),
    "randomk": RandomK(0.05),
    "threshold": Threshold(1.5),
    "int8": Int8(),
    "int8 stochastic": Int8(rounding="stochastic"),
    "int4": Int4(),
    "signsgd": SignSGD(),
    "onebit": OneBit(),
    "powersgd": PowerSGD(rank=4, min_compression_rate=1.0),
}
for _name, _knobs in METHODS.items():
    METHODS[_name] = dataclasses.replace(_knobs, min_size=100)


def parameters() -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def slots(names: list[str]) -> list[Slot]:
    return Slot.row([(name, math.prod(SHAPES[name])) for name in names])


def gradient(rank: int, step: int, names: list[str] | None = None) -> Tensor:
    """Of all parameters in a row, or of those named."""
    parts = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        seed = 1000 * step + 10 * rank + number
        numbers = torch.Generator().manual_seed(seed)
        parts[name] = torch.randn(math.prod(shape), generator=numbers)
    return torch.cat([parts[name] for name in names or list(SHAPES)])


class Steps(NamedTuple):
    """What one rank has after some steps."""

    results: list[Tensor]
    residuals: dict[str, Tensor]
    sent_bytes: int
    received_bytes: int


def reduced(
    comm: Communicator,
    knobs: Compressing,
    steps: int = 3,
    cuts: list[list[str]] | None = None,
    forget: bool = False,
) -> Steps:
    """Some steps; ``cuts`` are buckets by the names in them, ``forget`` drops residuals."""
    reducer = GradientReducer(knobs, parameters(), comm, seed=3)
    results = []
    for step in range(steps):
        found: dict[str, Tensor] = {}
        for names in cuts or [list(SHAPES)]:
            flat = reducer.reduce(gradient(comm.world.rank, step, names), slots(names))
            found.update({s.name: flat[s.begin : s.begin + s.size] for s in slots(names)})
        results.append(torch.cat([found[name] for name in SHAPES]))
        if forget:
            for residual in reducer.residuals.values():
                residual.zero_()
        reducer.advance()
    return Steps(results, reducer.residuals, *reducer.traffic)


def flat_of(residuals: Mapping[str, Tensor]) -> Tensor:
    """Residuals in a row; what has none owes nothing."""
    return torch.cat(
        [residuals.get(name, torch.zeros(math.prod(shape))) for name, shape in SHAPES.items()]
    )


def true_mean(step: int, size: int) -> Tensor:
    return torch.stack([gradient(rank, step) for rank in range(size)]).double().mean(0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_what_was_sent_and_what_is_owed_add_up_on_identical_ranks(name: str, size: int) -> None:
    knobs = METHODS[name]
    ranks = shared_pool(size).run(reduced, knobs)
    for other in ranks[1:]:
        assert all(map(torch.equal, other.results, ranks[0].results))
    sent = torch.stack(ranks[0].results).double().sum(0)
    owed = torch.stack([flat_of(rank.residuals) for rank in ranks]).double().mean(0)
    given = sum(true_mean(step, size) for step in range(3))
    lost = (sent + owed - given).abs().max()
    if name == "signsgd":
        return  # a vote is no mean: its own test says what it is
    # Rounding of the sum in fp16 and bf16 is nobody's residual; all else loses what fp32 loses.
    coarse = {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(name, 2.0**-22)
    assert lost <= 4 * size * coarse
    assert owed.abs().max() > 10 * 2.0**-22, "nothing was owed at all"


@pytest.mark.parametrize("name", ["topk", "randomk", "threshold", "int8", "int4", "onebit"])
def test_without_its_residual_a_method_loses_what_it_did_not_send(name: str) -> None:
    ranks = shared_pool(2).run(reduced, METHODS[name], 3, None, True)
    sent = torch.stack(ranks[0].results).double().sum(0)
    given = sum(true_mean(step, 2) for step in range(3))
    assert (sent - given).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["topk", "randomk", "threshold"])
def test_a_sparse_method_sends_values_bit_for_bit_and_keeps_the_rest_so(name: str) -> None:
    knobs = METHODS[name]
    first = shared_pool(2).run(reduced, knobs, 1)
    sent = []
    for rank, found in enumerate(first):
        corrected, owed = gradient(rank, 0), flat_of(found.residuals)
        untouched = owed == corrected
        assert (untouched | (owed == 0.0)).all()
        sent.append(torch.where(untouched, 0.0, corrected))
    small = torch.cat([torch.full((math.prod(s),), n == "small") for n, s in SHAPES.items()])
    expected = (sent[0] + sent[1]) / 2
    assert torch.equal(first[0].results[0][~small], expected[~small])
    plain = (gradient(0, 0) + gradient(1, 0)) / 2
    assert torch.equal(first[0].results[0][small], plain[small]), "too small to compress"


def test_top_k_sends_the_largest_of_each_parameter() -> None:
    for rank, found in enumerate(shared_pool(2).run(reduced, METHODS["topk"], 1)):
        parts = dict(
            zip(
                SHAPES,
                gradient(rank, 0).split([math.prod(s) for s in SHAPES.values()]),
                strict=True,
            )
        )
        for name, owed in found.residuals.items():
            count = round(0.05 * len(owed))
            largest = torch.topk(parts[name].abs(), count).indices
            assert (owed == 0.0).nonzero().view(-1).tolist() == sorted(largest.tolist())


@pytest.mark.parametrize("name", METHODS)
def test_how_buckets_are_cut_changes_nothing(name: str) -> None:
    whole, cut = (
        shared_pool(2).run(reduced, METHODS[name], 3, cuts)
        for cuts in (None, [["c", "small"], ["b"], ["a"]])
    )
    if name == "powersgd":  # torch multiplies matrices of one shape together
        for one, other in zip(whole[0].results[:1], cut[0].results[:1], strict=True):
            assert not torch.equal(one, other), "another bucket draws other factors"
        return
    for one, other in zip(whole, cut, strict=True):
        assert all(map(torch.equal, one.results, other.results))
        assert torch.equal(flat_of(one.residuals), flat_of(other.residuals))


def test_bytes_are_those_of_the_formats() -> None:
    counts = [2400, 1001, 2400]
    scales = 4 * (3 + 1 + 3)
    payloads = {
        "topk": 8 * (120 + 50 + 120),
        "int8": scales + sum(counts),
        "int4": 4 * (10 + 4 + 10) + 1200 + 501 + 1200,
        "signsgd": 4 * 3 + 300 + 126 + 300,
        "onebit": scales + 300 + 126 + 300,
    }
    plain = 4 * 7  # the small one, summed by two ranks: as much as it has
    for name, payload in payloads.items():
        for found in shared_pool(2).run(reduced, METHODS[name], 1):
            over = found.sent_bytes - plain - payload
            assert 0 <= over <= 8 + 3 * 7, (name, over)  # a header, and each part aligned
            assert found.received_bytes == found.sent_bytes
    sums = {"fp16": 2 * sum(counts), "bf16": 2 * sum(counts), "randomk": 4 * (120 + 50 + 120 + 1)}
    for size in (2, 4):
        for name, payload in sums.items():
            for found in shared_pool(size).run(reduced, METHODS[name], 1):
                moved = 2 * (size - 1) / size
                assert found.sent_bytes == int(moved * payload) + int(moved * plain)


def test_a_vote_is_the_sign_that_most_see_times_the_mean_magnitude() -> None:
    ranks = shared_pool(4).run(reduced, METHODS["signsgd"], 1)
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    by_rank = [gradient(rank, 0).split(sizes) for rank in range(4)]
    for number, (name, found) in enumerate(
        zip(SHAPES, ranks[0].results[0].split(sizes), strict=True)
    ):
        if name == "small":
            continue
        mine = torch.stack([parts[number] for parts in by_rank])
        scale = mine.abs().mean(1).mean()
        assert torch.allclose(found, mine.sign().sum(0).sign() * scale, rtol=1e-5)
        assert (found == 0.0).any(), "of four, some vote ends in a tie"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["randomk", "int8 stochastic"])
def test_without_a_residual_it_is_right_in_expectation(name: str) -> None:
    knobs = dataclasses.replace(METHODS[name], memory="none")
    draws = 600
    means = shared_pool(2).run(mean_of_draws, knobs, draws)
    assert torch.equal(means[0], means[1])
    truth = true_mean(0, 2)
    each = torch.stack([gradient(rank, 0) for rank in range(2)]).double()
    if name == "randomk":  # each element is sent with probability p and then divided by it
        p = 0.05
        deviation = truth.abs() * math.sqrt((1 - p) / p)
    else:
        step = each.abs().max() / 127
        deviation = (step / 2 / math.sqrt(2)).expand(truth.shape)
    # 6 standard deviations of the mean of independent draws, and what fp32 rounds.
    assert ((means[0] - truth).abs() <= 6 * deviation / math.sqrt(draws) + 1e-4).all()
    with_memory = shared_pool(2).run(
        mean_of_draws, dataclasses.replace(METHODS["topk"], memory="none"), 5
    )
    assert (with_memory[0] - truth).abs().max() > 0.3, "top-k claims nothing of the kind"


def mean_of_draws(comm: Communicator, knobs: Compressing, draws: int) -> Tensor:
    reducer = GradientReducer(knobs, parameters(), comm)
    total = torch.zeros_like(gradient(0, 0), dtype=torch.float64)
    for _ in range(draws):
        total += reducer.reduce(gradient(comm.world.rank, 0), slots(list(SHAPES)))
        reducer.advance()
    return total / draws


# -- warm-up, exclusion ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_warm_up_sends_plain_gradients_for_as_many_steps(name: str) -> None:
    knobs = dataclasses.replace(METHODS[name], warmup_steps=2)
    ranks = shared_pool(2).run(reduced, knobs)
    for step in (0, 1):
        plain = (gradient(0, step) + gradient(1, step)) / 2
        assert torch.equal(ranks[0].results[step], plain)
    plain = (gradient(0, 2) + gradient(1, 2)) / 2
    assert not torch.equal(ranks[0].results[2], plain)


def test_what_is_excluded_travels_as_it_is() -> None:
    knobs = dataclasses.replace(METHODS["topk"], exclude=("b", "[ac]"), min_size=0)
    plain = (gradient(0, 0) + gradient(1, 0)) / 2
    names = [name for name in SHAPES for _ in range(math.prod(SHAPES[name]))]
    small = torch.tensor([name == "small" for name in names])
    found = shared_pool(2).run(reduced, knobs, 1)[0]
    assert torch.equal(found.results[0][~small], plain[~small])
    assert not torch.equal(found.results[0][small], plain[small])
    assert set(found.residuals) == {"small"}


def refusal(comm: Communicator, knobs: Compressing, dtype: torch.dtype) -> str:
    try:
        GradientReducer(knobs, {n: t.to(dtype) for n, t in parameters().items()}, comm)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_pattern_that_matches_nothing_and_a_dtype_that_cannot_be_taken_are_refused() -> None:
    (words, _) = shared_pool(2).run(refusal, TopK(exclude=("*.bias",)), torch.float32)
    assert "compression.exclude: the pattern '*.bias' matches no parameter" in words
    (words, _) = shared_pool(2).run(refusal, TopK(), torch.float64)
    assert words.startswith("compression=topk cannot take gradients in float64, and a has such")


# -- gradients that are not finite, and units ------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_gradient_that_is_not_finite_shows_on_every_rank_and_spoils_no_residual(
    name: str,
) -> None:
    for broken, before, after, later in shared_pool(2).run(overflow, METHODS[name]):
        assert not math.isfinite(float(broken.sum()))
        assert later.isfinite().all()
        if before is not None:
            assert torch.equal(before, after)


def overflow(
    comm: Communicator, knobs: Compressing
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    reducer = GradientReducer(knobs, parameters(), comm)
    everything, rank = slots(list(SHAPES)), comm.world.rank
    reducer.reduce(gradient(rank, 0), everything)
    reducer.advance()
    before = flat_of(reducer.residuals).clone()
    spoilt = gradient(rank, 1)
    if rank == 1:
        spoilt[100] = math.inf
    broken = reducer.reduce(spoilt, everything)
    reducer.advance()
    after = flat_of(reducer.residuals).clone()
    later = reducer.reduce(gradient(rank, 2), everything)
    mine = (before, after) if rank == 1 else (None, None)
    return broken, *mine, later


def test_a_loss_scale_changes_nothing_but_the_unit() -> None:
    for plain, scaled in shared_pool(2).run(scaled_steps):
        assert all(map(torch.equal, plain, scaled))


def scaled_steps(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
    """Three steps as they are, and with scales that change; powers of two round nothing."""
    found = []
    for scales in ((1.0, 1.0, 1.0), (1024.0, 512.0, 4096.0)):
        reducer = GradientReducer(METHODS["threshold"], parameters(), comm)
        results = []
        for step, scale in enumerate(scales):
            reducer.unit = scale
            flat = gradient(comm.world.rank, step) * scale
            results.append(reducer.reduce(flat, slots(list(SHAPES))) / scale)
            reducer.advance()
        found.append(results)
    return found[0], found[1]


# -- PowerSGD --------------------------------------------------------------------------------------


def test_powersgd_is_torchs_hook_with_its_error_feedback() -> None:
    for ours, theirs in shared_pool(2).run(both_powersgd):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def both_powersgd(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    names = ["a", "c"]
    given = {name: torch.zeros(SHAPES[name]) for name in names}
    reducer = GradientReducer(METHODS["powersgd"], given, comm)
    ours = []
    for step in range(4):
        ours.append(reducer.reduce(gradient(comm.world.rank, step, names), slots(names)))
        reducer.advance()
    fresh = GradientReducer(METHODS["powersgd"], given, comm)
    state = PowerSGDState(
        comm.process_group,
        matrix_approximation_rank=4,
        start_powerSGD_iter=2,
        min_compression_rate=1.0,
        orthogonalization_epsilon=1e-8,
        random_seed=fresh._draw.seed_of("factor", "a\nc") % 2**32,
    )
    state.iter = 3

    class Bucket:
        def __init__(self, flat: Tensor) -> None:
            self.flat = flat

        def buffer(self) -> Tensor:
            return self.flat

        def index(self) -> int:
            return 0

        def is_last(self) -> bool:
            return False

        def gradients(self) -> list[Tensor]:
            return [part.view(60, 40) for part in self.flat.split(2400)]

    theirs: list[Tensor] = []
    for step in range(4):
        bucket: Any = Bucket(gradient(comm.world.rank, step, names))
        theirs.append(powerSGD_hook(state, bucket).wait())
    return ours, theirs


def test_powersgd_of_full_rank_loses_nothing() -> None:
    knobs = dataclasses.replace(METHODS["powersgd"], rank=40, min_compression_rate=0.5)
    found = shared_pool(2).run(reduced, knobs, 1)[0]
    assert torch.allclose(found.results[0].double(), true_mean(0, 2), atol=1e-5)


def test_powersgd_goes_on_from_its_factors_in_another_layout() -> None:
    for factors, resumed in shared_pool(2).run(relaid):
        assert set(factors) == {"a", "c"}
        for name in factors:
            assert torch.equal(factors[name], resumed[name])


def relaid(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The factors after two steps, and what a reducer with other buckets begins its third with."""
    names = list(SHAPES)
    reducer = GradientReducer(METHODS["powersgd"], parameters(), comm)
    for step in range(2):
        reducer.reduce(gradient(comm.world.rank, step), slots(names))
        reducer.advance()
    factors = {name: q.clone() for name, q in reducer.shared_state().items()}
    other = GradientReducer(METHODS["powersgd"], parameters(), comm)
    other.load_shared_state(factors)
    method = other._method
    assert isinstance(method, LowRank)
    begun: dict[str, Tensor] = {}
    prepare = method._prepare

    def watched(key: str, pieces: Any) -> None:
        prepare(key, pieces)
        held = method._state.q_memory_dict[key].split(
            [q.numel() for q in map(factors.get, [p.name for p in pieces])]
        )
        begun.update(
            {p.name: q.view_as(factors[p.name]).clone() for p, q in zip(pieces, held, strict=True)}
        )

    method._prepare = watched  # type: ignore[method-assign]
    for cut in (["c", "small"], ["a", "b"]):
        other.reduce(gradient(comm.world.rank, 2, cut), slots(cut))
    return factors, begun


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2), (2, 4), (4, 4)])
def test_what_ranks_owe_survives_a_checkpoint_on_any_number_of_ranks(
    before: int, after: int, tmp_path: Path
) -> None:
    saved = shared_pool(before).run(save_residuals, tmp_path)
    found = shared_pool(after).run(load_residuals, tmp_path)
    for name in ("a", "b"):
        owed = torch.stack([rank[name] for rank in saved]).double().mean(0)
        taken = torch.stack([rank[name] for rank in found]).double().mean(0)
        assert owed.abs().max() > 0.1
        assert torch.allclose(taken, owed, atol=1e-7)
        if before == after:
            assert all(torch.equal(f[name], s[name]) for f, s in zip(found, saved, strict=True))
    assert all(rank["step"] == 7 for rank in found)


def model() -> nn.Module:
    """``a`` lies in memory as channels last does, ``b`` in rows."""
    made = nn.Module()
    made.a = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    made.b = nn.Parameter(torch.zeros(6, 5))
    return made


def residual_reducer(comm: Communicator) -> tuple[nn.Module, GradientReducer]:
    made = model()
    return made, GradientReducer(TopK(min_size=0), dict(made.named_parameters()), comm)


def in_rows(made: nn.Module, reducer: GradientReducer) -> dict[str, Any]:
    """Residuals in the shape of their parameters."""
    named = dict(made.named_parameters())
    return {
        name: residual.as_strided(named[name].shape, named[name].stride()).clone()
        for name, residual in reducer.residuals.items()
    }


def save_residuals(comm: Communicator, folder: Path) -> dict[str, Any]:
    made, reducer = residual_reducer(comm)
    numbers = torch.Generator().manual_seed(comm.world.rank)
    for residual in reducer.residuals.values():
        residual.copy_(torch.randn(residual.shape, generator=numbers))
    for _ in range(7):
        reducer.advance()
    checkpointer = DcpCheckpointer(folder, comm)
    state = CompressedBuckets(reducer, made, as_in_memory=True).state_dict()
    checkpointer.save(7, {"engine": {"compression": state}}, {})
    checkpointer.close()
    return in_rows(made, reducer)


def load_residuals(comm: Communicator, folder: Path) -> dict[str, Any]:
    made, reducer = residual_reducer(comm)
    checkpointer = DcpCheckpointer(folder, comm)
    path = checkpointer.find("auto")
    assert path is not None
    entries = CompressedBuckets(reducer, made, as_in_memory=True)
    entries.expect(checkpointer.plain(path)["engine"]["compression"])
    loaded = checkpointer.load({"engine": {"compression": entries.template()}}, path=path)
    entries.load(loaded["engine"]["compression"])
    checkpointer.close()
    return {**in_rows(made, reducer), "step": reducer.step}


# -- under torch's DistributedDataParallel, without a strategy -------------------------------------


def test_a_plain_ddp_takes_a_compressor() -> None:
    for compressed, excluded, steps, same in shared_pool(2).run(plain_ddp):
        assert same
        assert steps == 2  # the third has not begun
        assert compressed == 3 * 2
        assert excluded


def plain_ddp(comm: Communicator) -> tuple[int, bool, int, bool]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
    ddp = DistributedDataParallel(net, process_group=comm.process_group, bucket_cap_mb=0.005)
    compressor = GradientCompressor().algorithm(TopK(0.1)).memory(Residual())
    reducer = attach(ddp, compressor.exclude("*.bias"))
    assert reducer is not None
    sent = 0
    for step in range(3):
        torch.manual_seed(10 * step + comm.world.rank)
        net.zero_grad()
        ddp(torch.randn(8, 40)).square().mean().backward()
        sent += sum(
            int((p.grad != 0).float().mean() <= 0.2) for p in (net[0].weight, net[2].weight)
        )
    gradients = torch.cat([p.grad.view(-1) for p in net.parameters()])
    same = all(torch.equal(gradients, other) for other in comm.all_gather(gradients))
    return sent, bool((net[0].bias.grad != 0).all()), reducer.step, same


def test_with_compression_returns_the_same_ddp_and_refuses_what_would_lose_a_residual() -> None:
    for same, words in shared_pool(2).run(attached):
        assert same
        assert "find_unused_parameters" in words
        assert "compression.memory=none" in words


def attached(comm: Communicator) -> tuple[bool, str]:
    def made(**options: Any) -> DistributedDataParallel:
        net = nn.Linear(40, 40)
        return DistributedDataParallel(net, process_group=comm.process_group, **options)

    ddp = made()
    same = with_compression(ddp, TopK(0.1)) is ddp
    try:
        with_compression(made(find_unused_parameters=True), TopK(0.1))
    except Unsupported as error:
        return same, str(error)
    return same, ""
