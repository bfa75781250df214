"""Every stage keeps the contract of strategies: the result of plain PyTorch."""

from dataclasses import replace

import pytest
from torsh_trainer_deepspeed import DeepSpeed

from torsh_trainer.testing import StrategyContract
from torsh_trainer.testing.compare import U16, UB16, Tolerance

SMALL = DeepSpeed(reduce_bucket_size=200, allgather_bucket_size=200)
REFUSED = {
    "several_optimizers": "an engine of DeepSpeed has one",
    "unused_parameters": "DeepSpeed updates a parameter without a gradient as if it were zero",
}
SHARDED = {
    **REFUSED,
    "clip_value": "gradients lie in flat partitions, where DeepSpeed clips by norm",
}


# At stage 3 DeepSpeed computes a linear layer in two steps: the product is rounded to the low
# precision before the bias is added. So an activation differs by one rounding more, from the first
# loss on, and by as much again in the gradients: twice the bounds of the others.
ROUNDED_TWICE = {
    "bf16-mixed": Tolerance(first=UB16, relative=4 * UB16, parameters=4 * UB16),
    "bf16-true": Tolerance(first=UB16, relative=4 * UB16, parameters=4 * UB16),
    "fp16-mixed": Tolerance(first=U16, relative=4 * U16, parameters=8 * U16),
}

WITHOUT_EMA = {**SHARDED, "ema": "no rank has whole parameters to average"}


class TestStage0(StrategyContract):
    strategy = replace(SMALL, stage=0)
    world_sizes = (2,)
    refuses = REFUSED


class TestStage1(StrategyContract):
    variant = True
    strategy = replace(SMALL, stage=1)
    world_sizes = (2,)
    refuses = SHARDED


class TestStage2(StrategyContract):
    variant = True
    strategy = replace(SMALL, stage=2)
    world_sizes = (2,)
    refuses = SHARDED


class TestStage3(StrategyContract):
    strategy = replace(SMALL, stage=3)
    tolerances = ROUNDED_TWICE
    refuses = WITHOUT_EMA


@pytest.mark.matrix(9)
@pytest.mark.parametrize("stage", [TestStage0, TestStage1, TestStage2])
@pytest.mark.parametrize(
    "rule",
    [
        StrategyContract.test_accumulated_micro_batches_equal_one_large_batch,
        StrategyContract.test_the_tail_of_an_accumulated_step_counts_every_sample_once,
        StrategyContract.test_weights_count_across_accumulated_micro_batches,
        StrategyContract.test_clipping_by_norm_uses_the_norm_of_the_global_gradient,
        StrategyContract.test_adamw_with_clipping_and_a_schedule_equals_plain_pytorch,
        StrategyContract.test_true_bf16_equals_a_bf16_model_with_an_fp32_master,
        StrategyContract.test_mixed_fp16_scales_the_loss_and_skips_overflow_as_torch_does,
        StrategyContract.test_a_step_with_a_non_finite_gradient_changes_nothing_on_any_rank,
        StrategyContract.test_a_state_carries_training_into_a_fresh_engine,
    ],
)
def test_on_four_ranks(stage, rule):
    """The rules in which four ranks divide what two do not; stage 3 keeps all of them there."""
    rule(stage(), 4)
