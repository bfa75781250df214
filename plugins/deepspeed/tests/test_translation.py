"""What ``translate --mode exact`` makes of a configuration, trained beside the real engine.

Both start from the same weights and see the same samples. In bf16 and fp16 the losses are the same
to the last bit, and so are the fp32 masters after plain SGD; after Adam with clipping the masters
are a rounding of fp32 apart, since the norm is summed up in another order.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from beside_deepspeed import (
    ADAMW,
    HALF,
    LR,
    SGD,
    STAGES,
    START_S,
    both,
    config_of,
    native,
    original,
    plan_of,
)

from torsh_trainer.strategies.base import Clip
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.trial import (
    FP32_BOUND,
    TrialRun,
    beyond,
    furthest,
    loss_apart,
    measure_moves,
    train_curve,
)


@pytest.mark.matrix(2)
@pytest.mark.proves(
    "batch.global",
    "batch.micro",
    "batch.accumulation",
    "gradients.dtype",
    "optimizer.type",
    "optimizer.lr",
    "precision.accumulation",
    "schedule.type",
    "zero.linear",
    "zero.stage",
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_in_fp32_a_translation_is_a_rounding_apart(stage, ranks):
    for accumulate in (1, 2, 3):
        for mine, theirs in zip(*both(config_of(stage, "fp32", accumulate), ranks), strict=True):
            assert loss_apart(mine, theirs) <= FP32_BOUND
            assert furthest(mine, theirs) <= FP32_BOUND
            assert mine.norms == pytest.approx(theirs.norms, rel=FP32_BOUND)


@pytest.mark.matrix(2)
@pytest.mark.proves(
    "gradients.dtype", "precision.accumulation", "precision.bf16", "zero.linear", "zero.stage"
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("stage", "precision"),
    # At stage 0 DeepSpeed refuses to add up in another dtype.
    [(stage, name) for stage in STAGES for name in HALF if stage or name == "bf16"],
)
def test_in_bf16_a_translation_gives_the_same_bits(stage, precision, ranks):
    for accumulate in (1, 2, 3):
        for mine, theirs in zip(*both(config_of(stage, precision, accumulate), ranks), strict=True):
            assert mine.losses == theirs.losses
            assert furthest(mine, theirs) == 0.0
            assert mine.norms == pytest.approx(theirs.norms, rel=FP32_BOUND)


@pytest.mark.matrix(2)
@pytest.mark.proves(
    "gradients.dtype",
    "precision.accumulation",
    "precision.fp16",
    "scale.fixed",
    "scale.initial",
    "scale.window",
    "zero.stage",
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_fp16_it_does_too_through_growths_of_the_loss_scale(stage, ranks):
    for accumulate in (1, 2, 3):
        config = config_of(stage, "fp16", accumulate)
        for mine, theirs in zip(*both(config, ranks), strict=True):
            assert mine.losses == theirs.losses
            assert furthest(mine, theirs) == 0.0
            assert mine.scales == theirs.scales
            assert mine.scales[0] != mine.scales[-1]
            assert mine.norms == pytest.approx(theirs.norms, rel=FP32_BOUND)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp16_at_stage_0_is_what_was_meant(ranks):
    """Which DeepSpeed's own stage 1 does: the same masters, scale and roundings.

    Its stage 0 divides by a scale by which it has not multiplied, and refuses a CPU.
    """
    for accumulate in (1, 2, 3):
        config = config_of(0, "fp16", accumulate)
        assert plan_of(config, ranks).exit_code == 10
        mine = shared_pool(ranks).run(train_curve, native(config, ranks), timeout_s=START_S)
        meant = original(json.dumps(config_of(1, "fp16", accumulate)), ranks)
        for one, other in zip(mine, meant, strict=True):
            assert one.losses == other.losses
            assert one.scales == other.scales
            assert furthest(one, other) == 0.0


@pytest.mark.proves("scale.hysteresis", "scale.refill")
def test_overflows_leave_the_same_scale_behind():
    config = config_of(2, "fp16", 1)
    config["fp16"] |= {"initial_scale_power": 30, "hysteresis": 2, "loss_scale_window": 1}
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert mine.scales == theirs.scales
        assert mine.scales[1] == mine.scales[0] > mine.scales[-1]
        assert mine.losses == theirs.losses


@pytest.mark.matrix(3)
@pytest.mark.proves(
    "gradients.clipping",
    "gradients.clipping-old",
    "optimizer.kernel",
    "optimizer.type",
    "optimizer.weight-decay",
    "zero.stage",
    "zero.unused",
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_with_adamw_decay_and_clipping_it_stays_a_rounding_apart(stage, precision):
    config = config_of(stage, precision, 2, optimizer=ADAMW, gradient_clipping=0.3)
    config["zero_optimization"]["ignore_unused_parameters"] = True
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert max(theirs.norms) > 0.3
        assert loss_apart(mine, theirs) <= (0.0 if precision == "bf16" else 1e-5)
        # Adam divides a gradient by its own size: the roundings of small ones grow. What no forward
        # reaches decays on both sides.
        assert furthest(mine, theirs) <= 1e-4


CONTROLS = {
    "masters that begin unrounded": (1, "bf16", SGD, {"precision": {"rounded_start": False}}),
    "sums in fp32, stage 1": (1, "bf16", SGD, {"precision": {"gradients": "fp32"}}),
    "sums in fp32, stage 2": (2, "bf16", SGD, {"precision": {"gradients": "fp32"}}),
    "sums in bf16": (2, "bf16, sums in fp32", SGD, {"precision": {"gradients": "bf16"}}),
    "gradients that travel in fp32": (
        1,
        "bf16, sums in fp32",
        SGD,
        {"precision": {"reduce": "fp32"}},
    ),
    "linear layers that round once": (3, "bf16", SGD, {"precision": {"rounded_products": False}}),
    "no phantom step": (0, "bf16", ADAMW, {"phantom_lr": None}),
    "no clipping": (1, "fp32", SGD, {"clip": Clip()}),
    "unused parameters that stay": (
        1,
        "fp32",
        ADAMW,
        {"strategy": DDP(zero1=True, find_unused_parameters=True)},
    ),
    "unused shards that stay": (3, "fp32", ADAMW, {"strategy": FSDP()}),
    "growth a step early": (
        2,
        "fp16",
        SGD,
        {"precision": {"loss_scaling": {"growth_delay": 0}}},
    ),
    "a growth that halves nothing": (
        2,
        "fp16",
        SGD,
        {"precision": {"loss_scaling": {"divide_by_grown": False}}},
    ),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("control", CONTROLS)
def test_a_rule_that_is_switched_off_is_seen(control):
    stage, precision, optimizer, spoilt = CONTROLS[control]
    clip = 0.3 if "clip" in spoilt else 0.0
    config = config_of(stage, precision, 3, optimizer=optimizer, gradient_clipping=clip)
    (right, *_), (theirs, *_) = both(config, 2)
    (mine, *_), _ = both(config, 2, **spoilt)
    bound = 10 * max(FP32_BOUND, furthest(right, theirs))
    assert furthest(mine, theirs) > bound or mine.scales != theirs.scales


ACCUMULATIONS = (1, 2, 3)
LOW = [
    (stage, name)
    for stage in STAGES
    for name in (*HALF, "fp16")
    if stage or name == "bf16"  # at stage 0 DeepSpeed adds up in bf16 alone, and fp16 is wrong
]


@pytest.mark.matrix(1)
@pytest.mark.proves("gradients.dtype", "zero.stage")
@pytest.mark.parametrize("stage", STAGES)
def test_on_four_ranks_fp32_is_a_rounding_apart(stage):
    for accumulate in ACCUMULATIONS:
        for mine, theirs in zip(*both(config_of(stage, "fp32", accumulate), 4), strict=True):
            assert loss_apart(mine, theirs) <= FP32_BOUND
            assert furthest(mine, theirs) <= FP32_BOUND


def share_of_the_bound(config: dict[str, Any], run: TrialRun) -> float:
    """How far a step on four ranks is apart at most, as a share of what its roundings allow."""
    theirs = original(json.dumps(config), 4)[0]
    found = shared_pool(4).run(measure_moves, run, theirs.parameters[:-1], timeout_s=START_S)[0]
    low = "fp16" if "fp16" in config else "bf16"
    roundings = 4 - 1 + run.accumulate - 1
    return beyond(found, theirs, low=low, roundings=roundings, lr=LR)


@pytest.mark.matrix(2)
@pytest.mark.proves("gradients.dtype", "precision.accumulation", "precision.fp16", "zero.stage")
@pytest.mark.parametrize(("stage", "precision"), LOW)
@pytest.mark.exhaustive
def test_on_four_ranks_a_step_differs_by_the_roundings_of_a_sum_at_most(stage, precision):
    """Which of them there are depends on a value's place in its buffer: here and there another."""
    for accumulate in ACCUMULATIONS:
        config = config_of(stage, precision, accumulate)
        assert share_of_the_bound(config, native(config, 4)) <= 1.0


@pytest.mark.matrix(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_that_is_too_long_is_beyond_them(precision):
    config = config_of(1, precision, 2)
    longer = {"type": "SGD", "params": {"lr": 1.3 * LR}}
    run = native({**config, "optimizer": longer}, 4)
    assert share_of_the_bound(config, run) > 1.0
