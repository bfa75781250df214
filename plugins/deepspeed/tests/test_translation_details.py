"""Gradients, precision, and knobs of speed and memory of a translation, beside DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from beside_deepspeed import STAGES, START_S, both, config_of, native, original_run, plan_of
from torch import nn
from torch.nn import functional as F

from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.trial import (
    FP32_BOUND,
    STEPS,
    furthest,
    loss_apart,
    train_curve,
)
from torsh_trainer.verify.subject import LENGTH, VOCABULARY, Subject

WHOLE = {"reduce_scatter": False}
DIVIDED: list[tuple[str, int, str, dict[str, Any], dict[str, Any]]] = [
    ("before, stage 0", 0, "fp32", {"prescale_gradients": True}, {}),
    ("before, stage 0", 0, "bf16", {"prescale_gradients": True}, {}),
    ("before, stage 1", 1, "fp32", {"prescale_gradients": True}, {}),
    ("before, whole, stage 1", 1, "bf16", {"prescale_gradients": True}, WHOLE),
    ("before, whole, stage 2", 2, "fp32", {"prescale_gradients": True}, WHOLE),
    ("before, whole, stage 3", 3, "fp32", {"prescale_gradients": True}, WHOLE),
    ("by a factor, stage 0", 0, "fp32", {"gradient_predivide_factor": 1.5}, {}),
    ("by a factor, stage 1", 1, "fp32", {"gradient_predivide_factor": 1.5}, {}),
    ("by a factor, whole, stage 2", 2, "fp32", {"gradient_predivide_factor": 1.5}, WHOLE),
]


@pytest.mark.matrix(3)
@pytest.mark.proves("gradients.prescale", "gradients.predivide", "zero.reduce-scatter")
@pytest.mark.parametrize(("_", "stage", "precision", "top", "zero"), DIVIDED)
def test_where_gradients_are_divided_moves_a_rounding_at_most(_, stage, precision, top, zero):
    config = config_of(stage, precision, 2, **top)
    config["zero_optimization"] |= zero
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert loss_apart(mine, theirs) <= (0.0 if precision == "bf16" else FP32_BOUND)
        assert furthest(mine, theirs) <= (0.0 if precision == "bf16" else FP32_BOUND)


@pytest.mark.matrix(2)
@pytest.mark.proves("gradients.clipping")
@pytest.mark.parametrize("stage", STAGES)
def test_a_file_that_says_nothing_clips_at_1(stage):
    config = config_of(stage, "fp32", 1)
    del config["gradient_clipping"]
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert max(theirs.norms) > 1.0
        assert furthest(mine, theirs) <= FP32_BOUND


WRITTEN_OUT: dict[str, Any] = {
    "fp16": {"enabled": False},
    "bf16": {"enabled": False},
    "torch_autocast": {"enabled": False},
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "communication_data_type": None,
    "data_types": {"keep_in_fp32_modules": []},
}
HALF_WRITTEN_OUT: dict[str, Any] = {
    "bf16": {
        "enabled": True,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
        "immediate_grad_update": True,
    },
    "communication_data_type": "bf16",
    "data_types": {"grad_accum_dtype": "bf16", "param_dtype": "bf16", "buffer_dtype": "fp32"},
}


@pytest.mark.matrix(1)
@pytest.mark.proves(
    "batch.managed",
    "gradients.dtype",
    "gradients.op",
    "gradients.predivide",
    "gradients.prescale",
    "precision.accumulation",
    "precision.autocast",
    "precision.bf16",
    "precision.bf16-update",
    "precision.buffers",
    "precision.fp16",
    "precision.half-masters",
    "precision.kept",
    "precision.parameters",
)
@pytest.mark.parametrize("stage", STAGES)
def test_defaults_that_are_written_out_are_the_same_defaults(stage):
    for written, bound in ((WRITTEN_OUT, FP32_BOUND), (HALF_WRITTEN_OUT, 0.0)):
        config = config_of(stage, "fp32", 2, **written)
        assert plan_of(config, 2).exit_code in (0, 10)
        for mine, theirs in zip(*both(config, 2), strict=True):
            assert loss_apart(mine, theirs) <= bound
            assert furthest(mine, theirs) <= bound


@pytest.mark.matrix(2)
@pytest.mark.proves("precision.bf16-overflow", "zero.stage")
@pytest.mark.parametrize(
    ("stage", "checks"),
    # None stands for fp32, which stage 0 does not check, and here the run would stop.
    [(stage, c) for stage in STAGES for c in (True, False, None) if stage or c is not None],
)
def test_a_step_that_is_not_finite_is_skipped_where_deepspeed_skips_it(stage, checks):
    config = config_of(stage, "fp32" if checks is None else "bf16", 1, infinite_at=2)
    if checks is not None:
        config["bf16"] = {"enabled": True, "check_grad_overflow": checks}
    for mine, theirs in zip(*both(config, 2), strict=True):
        ours, others = (torch.tensor(c.losses, dtype=torch.double) for c in (mine, theirs))
        rtol = FP32_BOUND if checks is None else 0.0
        assert torch.allclose(ours, others, rtol=rtol, atol=0.0, equal_nan=True)
        finite = bool(torch.isfinite(others[-1]).all())
        assert finite == (checks is not False or stage in (0, 3))


@pytest.mark.proves("scale.fixed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_fixed_scale_stays(stage):
    config = config_of(stage, "fp16", 2)
    config["fp16"] = {"enabled": True, "loss_scale": 32}
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert mine.losses == theirs.losses
        assert furthest(mine, theirs) == 0.0
        assert mine.scales == theirs.scales == [32.0] * STEPS


class Images(Subject):
    """Floating-point inputs, from a loader that knows of no precision."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(LENGTH, 16), nn.GELU(), nn.Linear(16, VOCABULARY))

    def forward(self, model: Any, batch: Any) -> Any:
        return model(batch[0].float() / VOCABULARY)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.float(), batch[1][:, 0])


@pytest.mark.proves("precision.inputs")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_inputs_are_cast_as_deepspeed_casts_them(stage):
    config = config_of(stage, "fp16", 2)
    config["fp16"]["auto_cast"] = True
    mine = shared_pool(2).run(
        train_curve, replace(native(config, 2), task=Images), timeout_s=START_S
    )
    theirs = replace(original_run(config), task=Images)
    for one, other in zip(
        mine, shared_pool(2).run(train_curve, theirs, timeout_s=START_S), strict=True
    ):
        assert one.losses == other.losses
        assert furthest(one, other) == 0.0


# -- speed and memory ------------------------------------------------------------------------------

FLIPPED: dict[str, Any] = {
    "overlap_comm": True,
    "contiguous_gradients": False,
    "reduce_bucket_size": 50,
    "allgather_bucket_size": 50,
    "sub_group_size": 30,
    "use_multi_rank_bucket_allreduce": False,
    "stage3_prefetch_bucket_size": 10,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 10,
    "stage3_max_reuse_distance": 0,
    "zero_hpz_partition_size": 2,
}


@pytest.mark.matrix(1)
@pytest.mark.proves(
    "zero.buckets",
    "zero.contiguous",
    "zero.layout",
    "zero.overlap",
    "zero.prefetch",
    "zero.reduce-bucket",
    "zero.secondary-shard",
    "zero.tiles",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_knobs_of_speed_and_memory_move_no_bit(stage):
    config = config_of(stage, "bf16", 2)
    config["zero_optimization"] |= FLIPPED
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert mine.losses == theirs.losses
        assert furthest(mine, theirs) == 0.0
    # What DeepSpeed says the masters are forgets that it has put them in another order.
    config["zero_optimization"]["round_robin_gradients"] = True
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert mine.losses == theirs.losses
