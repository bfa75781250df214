"""Whole runs that compress their gradients: under DDP and FSDP2, interrupted, on other ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression import (
    BF16,
    FP16,
    Compressing,
    Compression,
    Int4,
    Int8,
    NoCompression,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    Threshold,
    TopK,
)
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import LossScaling, Precision
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import Leg, SentenceTask, differences, live, lives, saving
from torsh_trainer.testing.tiny import TinyModelOptions
from torsh_trainer.training.trainer import Trainer

STEPS = 6
SMALL = 0.0005  # MiB: six buckets of the tiny model
METHODS: dict[str, Compressing] = {
    "fp16": FP16(memory="residual"),
    "bf16": BF16(),
    "topk": TopK(0.1),
    "randomk": RandomK(0.2),
    "randomk scaled": RandomK(0.5, memory="none"),
    "threshold": Threshold(0.01),
    "int8": Int8(rounding="stochastic"),
    "int4": Int4(block_size=32),
    "signsgd": SignSGD(memory="none"),
    "onebit": OneBit(block_size=32),
    "powersgd": PowerSGD(rank=1, min_compression_rate=1.0),
    "powersgd cold": PowerSGD(rank=1, min_compression_rate=1.0, warm_start=False),
}
for _name, _knobs in METHODS.items():
    METHODS[_name] = dataclasses.replace(_knobs, min_size=8)


def trainer(
    compression: Compression, strategy: Strategy, *, overflows: bool = False, **knobs: Any
) -> Trainer:
    """Six steps, three an epoch; ``overflows`` scales losses and meets one that is too large."""
    if overflows:
        scaling = LossScaling(initial_scale=1024.0, growth_interval=2)
        knobs["precision"] = Precision(compute="fp16", loss_scaling=scaling)
    optimizers = "adamw" if overflows else "sgd"
    options = TinyModelOptions(dropout=0.3)
    return Trainer(
        task=SentenceTask(options, optimizers=optimizers, spoilt=5 if overflows else None),
        strategy=strategy,
        compression=compression,
        loading=Loading(batch_size=8, micro_batch_size=2),
        log_every=1,
        eval_every=None,
        eval_every_epochs=None,
        max_steps=STEPS,
        deterministic=True,
        device="cpu",
        log_level="error",
        **knobs,
    )


def journey(
    made: Trainer, size: int, folder: Path, stops: tuple[int | None, ...] = (STEPS,)
) -> list[Leg]:
    options = saving(folder / "-".join(map(str, stops)), keep_last=1)
    return shared_pool(size).run(
        lives, dataclasses.replace(made, checkpoint=options), folder, stops
    )


def same(found: Leg, expected: Leg) -> None:
    for name in ("consumed", "losses", "norms", "skipped", "rates"):
        assert differences(getattr(found, name), getattr(expected, name), name) == []
    assert differences(found.state, expected.state) == []


def identical(legs: list[Leg]) -> None:
    for leg in legs[1:]:
        assert differences(leg.state["model"], legs[0].state["model"]) == []


# -- DDP -------------------------------------------------------------------------------------------


IN_BUCKETS = [(name, DDP(bucket_cap_mb=SMALL)) for name in METHODS]
IN_BUCKETS += [(name, Gloo(bucket_cap_mb=SMALL)) for name in ("topk", "powersgd")]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "strategy"), IN_BUCKETS, ids=lambda one: one if isinstance(one, str) else one.name
)
def test_a_compressed_run_that_is_interrupted_equals_the_one_that_was_not(
    name: str, strategy: Strategy, tmp_path: Path
) -> None:
    knobs = dataclasses.replace(METHODS[name], warmup_steps=2)
    made = trainer(knobs, strategy)
    expected = journey(made, 2, tmp_path)
    identical(expected)
    for found, plain in zip(journey(made, 2, tmp_path, (1, 3, STEPS)), expected, strict=True):
        same(found, plain)
    state = expected[0].state["compression"]
    assert (state["step"], state["world_size"]) == (STEPS, 2)
    if knobs.keeps_residual:
        assert any(bool(residual.any()) for residual in state["residual"].values())
    if name == "powersgd":
        assert state["shared"]
    plain = journey(trainer(NoCompression(), strategy), 2, tmp_path / "plain")
    norms = [plain[0].norms[step] == expected[0].norms[step] for step in range(1, STEPS + 1)]
    assert norms[:2] == [True, True], "the warm-up compressed"
    assert not any(norms[2:]), "nothing was compressed"


@pytest.mark.parametrize("size", [2, 4])
def test_on_more_ranks_with_overflows_it_goes_on_exactly_too(size: int, tmp_path: Path) -> None:
    made = trainer(METHODS["topk"], DDP(bucket_cap_mb=SMALL), overflows=True)
    expected = journey(made, size, tmp_path)
    identical(expected)
    assert any(expected[0].skipped.values())
    assert all(
        bool(residual.isfinite().all())
        for residual in expected[0].state["compression"]["residual"].values()
    )
    for found, plain in zip(journey(made, size, tmp_path, (1, 4, STEPS)), expected, strict=True):
        same(found, plain)


@pytest.mark.parametrize("size", [2, 4])
def test_a_warm_up_without_end_is_training_without_compression(size: int, tmp_path: Path) -> None:
    plain = journey(trainer(NoCompression(), DDP()), size, tmp_path / "plain")
    knobs = dataclasses.replace(METHODS["topk"], warmup_steps=100)
    found = journey(trainer(knobs, DDP()), size, tmp_path / "warm")
    for one, other in zip(found, plain, strict=True):
        assert differences(one.norms, other.norms) == []
        assert differences(one.state["model"], other.state["model"]) == []


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "strategy",
    [
        DDP(overlap=False, bucket_cap_mb=SMALL),
        DDP(gradient_as_bucket_view=False),
        DDP(zero1=True),
        Gloo(bucket_cap_mb=SMALL),
        Gloo(overlap=False),
    ],
    ids=["flat", "own-gradients", "zero1", "gloo", "gloo-flat"],
)
@pytest.mark.parametrize("name", ["topk", "int8"])
def test_how_buckets_are_carried_changes_nothing(
    name: str, strategy: Strategy, tmp_path: Path
) -> None:
    expected = journey(trainer(METHODS[name], DDP()), 2, tmp_path / "ddp")
    found = journey(trainer(METHODS[name], strategy), 2, tmp_path / "other")
    for one, other in zip(found, expected, strict=True):
        assert differences(one.norms, other.norms) == []
        assert differences(one.state["model"], other.state["model"]) == []
        assert differences(one.state["compression"], other.state["compression"]) == []


def test_a_static_graph_compresses_each_micro_batch_of_its_first_step(tmp_path: Path) -> None:
    """It is learnt in a step that communicates every time, so that step differs from DDP's."""
    found = journey(trainer(METHODS["topk"], DDP(static_graph=True)), 2, tmp_path)
    identical(found)
    assert sorted(found[0].norms) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("size", [2, 4])
def test_a_method_that_loses_nothing_trains_as_none_does(size: int, tmp_path: Path) -> None:
    plain = journey(trainer(NoCompression(), DDP()), size, tmp_path / "plain")
    found = journey(trainer(TopK(1.0, min_size=0), DDP()), size, tmp_path / "all")
    for one, other in zip(found, plain, strict=True):
        for step, norm in other.norms.items():
            assert abs(one.norms[step] - norm) <= 64 * 2.0**-24 * norm
        for name, value in other.state["model"].items():
            assert torch.allclose(one.state["model"][name], value, rtol=1e-5, atol=1e-6)


# -- another strategy, number of ranks or compression ----------------------------------------------


def go_on(
    before: Trainer, size: int, after: Trainer, on: int, folder: Path
) -> tuple[list[Leg], list[Leg]]:
    """Three steps on ``size`` ranks, and what is left of six on ``on``."""
    options = saving(folder)
    first = shared_pool(size).run(leg, dataclasses.replace(before, checkpoint=options), folder, 3)
    second = shared_pool(on).run(leg, dataclasses.replace(after, checkpoint=options), folder, None)
    return first, second


def leg(comm: Communicator, made: Trainer, folder: Path, until: int | None) -> Leg:
    return live(comm, made, folder, until=until)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_a_compressed_run_goes_on_with_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    made = trainer(METHODS["topk"], DDP())
    first, second = go_on(made, before, made, after, tmp_path)
    identical(second)
    assert sorted(second[0].norms) == [4, 5, 6]
    assert second[0].state["compression"]["world_size"] == after
    assert first[0].state["compression"]["step"] == 3


CHANGES: dict[str, tuple[Compression, Compression]] = {
    "on": (NoCompression(), METHODS["topk"]),
    "off": (METHODS["topk"], NoCompression()),
    "another": (METHODS["topk"], METHODS["onebit"]),
    "another share": (METHODS["powersgd"], dataclasses.replace(METHODS["topk"], min_size=100)),
    "without memory": (METHODS["topk"], dataclasses.replace(METHODS["topk"], memory="none")),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("change", CHANGES)
def test_the_compression_may_be_changed_at_a_checkpoint(change: str, tmp_path: Path) -> None:
    before, after = (trainer(knobs, DDP()) for knobs in CHANGES[change])
    _, second = go_on(before, 2, after, 2, tmp_path)
    identical(second)
    assert sorted(second[0].norms) == [4, 5, 6]


def test_what_was_owed_is_paid_by_another_method(tmp_path: Path) -> None:
    """A run that goes on with top-k of everything pays all residuals in its first step."""
    everything = TopK(1.0, min_size=8)
    first, second = go_on(
        trainer(METHODS["topk"], DDP()), 2, trainer(everything, DDP()), 2, tmp_path
    )
    owed = first[0].state["compression"]["residual"]
    assert any(bool(residual.any()) for residual in owed.values())
    left = second[0].state["compression"]["residual"]
    assert left.keys() == owed.keys()
    assert not any(bool(residual.any()) for residual in left.values())


def test_evaluation_needs_no_residuals(tmp_path: Path) -> None:
    made = trainer(METHODS["topk"], DDP())
    journey(made, 2, tmp_path)
    looking = dataclasses.replace(
        made,
        stages=("evaluate",),
        compression=NoCompression(),
        checkpoint=saving(tmp_path / str(STEPS)),
    )
    assert shared_pool(2).run(evaluated, looking, tmp_path) == [True, True]


def evaluated(comm: Communicator, made: Trainer, folder: Path) -> bool:
    return bool(live(comm, made, folder).evaluations)


# -- FSDP2 -----------------------------------------------------------------------------------------

SHARDED: dict[str, tuple[Compressing, float]] = {
    # How far a rounded gradient may be from the true one, relative to the largest.
    "fp16": (FP16(min_size=8), 2.0**-10),
    "bf16": (BF16(min_size=8), 2.0**-7),
    "int8": (Int8(block_size=16, memory="none", min_size=8), 2.0 / 127),
    "int4": (Int4(block_size=16, memory="none", min_size=8), 2.0 / 7),
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SHARDED)
def test_fsdp_scatters_rounded_gradients(name: str, size: int, tmp_path: Path) -> None:
    knobs, bound = SHARDED[name]
    strategy = FSDP() if size == 2 else FSDP(shard_size=2)
    plain = journey(trainer(NoCompression(), strategy), size, tmp_path / "plain")
    made = trainer(knobs, strategy)
    found = journey(made, size, tmp_path / "compressed")
    first, truth = found[0].norms[1], plain[0].norms[1]
    assert first != truth, "nothing was compressed"
    assert abs(first - truth) <= bound * truth
    for resumed, one in zip(
        journey(made, size, tmp_path / "compressed", (1, 3, STEPS)), found, strict=True
    ):
        same(resumed, one)


def test_fsdp_warms_up_with_plain_gradients(tmp_path: Path) -> None:
    plain = journey(trainer(NoCompression(), FSDP()), 2, tmp_path / "plain")
    knobs = Int8(memory="none", min_size=8, warmup_steps=2, rounding="stochastic")
    made = trainer(knobs, FSDP())
    found = journey(made, 2, tmp_path / "warm")
    assert [found[0].norms[step] == plain[0].norms[step] for step in (1, 2, 3)] == [
        True,
        True,
        False,
    ]
    for resumed, one in zip(journey(made, 2, tmp_path / "warm", (1, 3, STEPS)), found, strict=True):
        same(resumed, one)


# -- what cannot be --------------------------------------------------------------------------------

SIXTEEN_BITS = Precision(reduce="bf16")
REFUSED: dict[str, tuple[Trainer, list[str]]] = {
    "fsdp topk": (
        trainer(TopK(), FSDP()),
        ["strategy=fsdp cannot honour compression=topk", "strategy=ddp"],
    ),
    "fsdp powersgd": (trainer(PowerSGD(), FSDP()), ["compression=powersgd"]),
    "fsdp residual": (
        trainer(Int8(), FSDP()),
        ["compression.memory=residual", "set compression.memory=none"],
    ),
    "fsdp exclude": (
        trainer(FP16(exclude=("*bias",)), FSDP()),
        ["strategy=fsdp cannot honour compression.exclude"],
    ),
    "reduce": (
        trainer(TopK(), DDP(), precision=SIXTEEN_BITS),
        ["precision.reduce=bf16 and compression=topk", "set precision.reduce=fp32"],
    ),
    "unused": (
        trainer(TopK(), DDP(find_unused_parameters=True)),
        ["compression.memory=residual", "find_unused_parameters"],
    ),
    "pattern": (
        trainer(TopK(exclude=("heads.*",)), DDP()),
        ["compression.exclude: the pattern 'heads.*' matches no parameter"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_one_error(case: str, tmp_path: Path) -> None:
    made, words = REFUSED[case]
    for found in shared_pool(2).run(refusal, made, tmp_path):
        assert all(word in found for word in words), found


def refusal(comm: Communicator, made: Trainer, folder: Path) -> str:
    try:
        live(comm, made, folder)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", [Single(), DDP(), FSDP()], ids=["single", "ddp", "fsdp"])
def test_one_process_says_that_it_compresses_nothing_and_trains(
    strategy: Strategy, tmp_path: Path
) -> None:
    (words, norms), *_ = shared_pool(1).run(alone, trainer(TopK(), strategy), tmp_path / "a")
    assert words == ["compression=topk does nothing here: one process sends no gradients"]
    (_, plain), *_ = shared_pool(1).run(alone, trainer(NoCompression(), strategy), tmp_path / "b")
    assert norms == plain


def alone(comm: Communicator, made: Trainer, folder: Path) -> tuple[list[str], dict[int, float]]:
    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    words: list[str] = []
    log, kept = logging.getLogger("torsh_trainer.strategies.compressing"), Kept()
    log.addHandler(kept)
    try:
        made = dataclasses.replace(made, checkpoint=saving(folder, at_end=False))
        return words, live(comm, made, folder).norms
    finally:
        log.removeHandler(kept)


# -- from the command line -------------------------------------------------------------------------

STEPS_AN_EPOCH, EPOCHS, WARMUP = 20, 40, 80
DIGITS = {
    "none": [],
    "topk": ["compression=topk", "compression.ratio=0.01", f"compression.warmup_steps={WARMUP}"],
}


@pytest.fixture(scope="module")
def digits(warm_command: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run directories of the recipe, twice as long as usual, on two ranks."""
    place = tmp_path_factory.mktemp("digits")
    for name, overrides in DIGITS.items():
        args = [
            *("+recipe=digits", "strategy=ddp", "checkpoint.at_end=false", f"hydra.run.dir={name}"),
            *(f"trainer.max_epochs={EPOCHS}", f"trainer.eval_every_epochs={EPOCHS}"),
            *overrides,
        ]
        ended = warm_command(args, processes=2, cwd=place)
        assert ended.returncode == 0, ended.stderr
    return {name: place / name for name in DIGITS}


def result_of(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    return result


@pytest.mark.exhaustive
def test_digits_learns_as_well_with_one_percent_of_its_gradients(digits: dict[str, Path]) -> None:
    none, topk = (result_of(digits[name]) for name in ("none", "topk"))
    assert none["steps"] == topk["steps"] == STEPS_AN_EPOCH * EPOCHS
    for split in ("accuracy", "test_accuracy"):
        assert none["metrics"][split] > 0.97
        assert topk["metrics"][split] >= none["metrics"][split] - 0.01


@pytest.mark.exhaustive
def test_reports_and_the_result_say_how_many_bytes_were_sent(digits: dict[str, Path]) -> None:
    names = ("sent_bytes_per_step", "received_bytes_per_step")
    assert [result_of(digits["none"])[name] for name in names] == [None, None]
    rows = map(json.loads, (digits["topk"] / "metrics.jsonl").read_text().splitlines())
    by_step = {row["step"]: [row[name] for name in names] for row in rows if "step_s" in row}
    warm = {tuple(sent) for step, sent in by_step.items() if step <= WARMUP}
    after = {tuple(sent) for step, sent in by_step.items() if step > WARMUP + 20}
    assert len(warm) == len(after) == 1, "of every step alike"
    (plain, received), (sent, _) = warm.pop(), after.pop()
    assert plain == received
    assert plain / 4 == int(plain / 4), "fp32"  # two ranks that sum send as much as they have
    assert sent < 0.05 * plain
    share = WARMUP / (STEPS_AN_EPOCH * EPOCHS)
    result = result_of(digits["topk"])
    assert result[names[0]] == pytest.approx(share * plain + (1 - share) * sent)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["compression=topk", "compression.ratio=0"], "compression.ratio=0.0 is not in (0, 1]"),
        (["compression=top"], "unknown compression 'top'"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_one_error(
    warm_door: Any, overrides: list[str], words: str
) -> None:
    ended = warm_door(["+recipe=digits", "launcher.num_processes=1", *overrides])
    assert ended.returncode == 2
    assert words in ended.stderr
