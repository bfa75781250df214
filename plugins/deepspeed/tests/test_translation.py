"""What ``translate --mode exact`` makes of a configuration, trained beside the real engine.

Both start from the same weights and see the same samples. In bf16 and fp16 the losses are the same
to the last bit, and so are the fp32 masters after plain SGD; after Adam with clipping the masters
are a rounding of fp32 apart, since the norm is summed up in another order.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torsh_trainer_deepspeed.original import Original

from torsh_trainer.strategies.base import Clip
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.trial import (
    FP32_BOUND,
    SAMPLES,
    STEPS,
    RankTrace,
    TrialRun,
    beyond,
    furthest,
    loss_apart,
    measure_moves,
    run_of,
    train_curve,
)
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import fill, translate
from torsh_trainer.translate.plan import Plan
from torsh_trainer.verify.subject import LENGTH, VOCABULARY, Subject

CONF = Path(__file__).parents[3] / "conf"
START_S = 400.0  # importing DeepSpeed on a busy machine

LR = 0.5
SGD = {"type": "SGD", "params": {"lr": LR}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}


def config_of(stage: int, precision: str, accumulate: int, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": SGD,
        **more,
    }
    if precision.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if precision == "bf16, sums in fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def plan_of(config: dict[str, Any], ranks: int) -> Plan:
    return translate(config, Options(world_size=ranks))


def native(config: dict[str, Any], ranks: int) -> TrialRun:
    """What the translation says; BatchNorm in fp32 alone."""
    run = run_of(plan_of(config, ranks), CONF, accumulate=config["gradient_accumulation_steps"])
    return replace(run, task=partial(Subject, batch_norm=run.precision.params == "fp32"))


@cache
def original(text: str, ranks: int) -> list[RankTrace]:
    """The real engine, once for every configuration."""
    run = original_run(json.loads(text))
    curves: list[RankTrace] = shared_pool(ranks).run(train_curve, run, timeout_s=START_S)
    return curves


def original_run(config: dict[str, Any]) -> TrialRun:
    config = dict(config)
    infinite_at = config.pop("infinite_at", None)
    low = any(config.get(low, {}).get("enabled") for low in ("bf16", "fp16"))
    return TrialRun(
        Original(config=fill(config), fp16_on_cpu=True),
        config["gradient_accumulation_steps"],
        task=partial(Subject, batch_norm=not low),
        infinite_at=infinite_at,
    )


def both(
    config: dict[str, Any], ranks: int, **other: Any
) -> tuple[list[RankTrace], list[RankTrace]]:
    """The translation, with ``other`` settings where a test spoils it, and the original."""
    run = native({key: v for key, v in config.items() if key != "infinite_at"}, ranks)
    run = replace(run, infinite_at=config.get("infinite_at"))
    precision = dict(other.pop("precision", {}))
    scaling = replace(run.precision.loss_scaling, **precision.pop("loss_scaling", {}))
    run = replace(run, precision=replace(run.precision, loss_scaling=scaling, **precision), **other)
    curves = shared_pool(ranks).run(train_curve, run, timeout_s=START_S)
    return curves, original(json.dumps(config), ranks)


HALF = ("bf16", "bf16, sums in fp32")
STAGES = (0, 1, 2, 3)


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


@pytest.mark.parametrize("control", CONTROLS)
def test_a_rule_that_is_switched_off_is_seen(control):
    stage, precision, optimizer, spoilt = CONTROLS[control]
    clip = 0.3 if "clip" in spoilt else 0.0
    config = config_of(stage, precision, 3, optimizer=optimizer, gradient_clipping=clip)
    (right, *_), (theirs, *_) = both(config, 2)
    (mine, *_), _ = both(config, 2, **spoilt)
    bound = 10 * max(FP32_BOUND, furthest(right, theirs))
    assert furthest(mine, theirs) > bound or mine.scales != theirs.scales


# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam with L2": ("Adam", {"lr": 0.01, "adam_w_mode": False, "weight_decay": 0.1}),
    "Adam is AdamW": ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "AMSGrad": ("AdamW", {"lr": 0.01, "amsgrad": True, "betas": [0.5, 0.6]}),
    "AdamW, said in full": (
        "AdamW",
        {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.0, "adam_w_mode": False},
    ),
    "AdamW by its defaults": ("AdamW", {}),
    "Adam by its defaults": ("Adam", {}),
    "Adagrad": (
        "Adagrad",
        {
            "lr": 0.02,
            "lr_decay": 0.1,
            "initial_accumulator_value": 0.1,
            "eps": 1e-3,
            "weight_decay": 0.1,
        },
    ),
    "Adagrad by its defaults": ("Adagrad", {}),
    "Adadelta": ("Adadelta", {"lr": 0.5, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.1}),
    "Adadelta by its defaults": ("Adadelta", {}),
    "Adamax": ("Adamax", {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1}),
    "ASGD": ("ASGD", {"lr": 0.1, "lambd": 0.1, "alpha": 0.5, "t0": 2, "weight_decay": 0.1}),
    "NAdam": (
        "NAdam",
        {
            "lr": 0.01,
            "momentum_decay": 0.1,
            "decoupled_weight_decay": True,
            "weight_decay": 0.1,
        },
    ),
    "RAdam": ("RAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RMSprop": (
        "RMSprop",
        {"lr": 0.001, "alpha": 0.5, "momentum": 0.5, "centered": True, "eps": 1e-3},
    ),
    "RMSprop by its defaults": ("RMSprop", {}),
    "Rprop": ("Rprop", {"lr": 0.001, "etas": [0.4, 1.5], "step_sizes": [1e-5, 0.01]}),
    "SGD with momentum": (
        "SGD",
        {"lr": 0.2, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    ),
    "SGD by Nesterov, climbing": (
        "SGD",
        {"lr": 0.02, "momentum": 0.8, "nesterov": True, "maximize": True, "foreach": True},
    ),
    "SGD by its defaults": ("SGD", {}),
    "Adafactor": ("Adafactor", {"lr": 0.05, "beta2_decay": -0.5, "d": 2.0}),
}
NOT_SHARDED = {"Rprop": 1, "Adafactor": 0}
"""Stages of optimizers that fsdp cannot step, or that are others over cut parameters."""


def optimizer_of(name: str) -> dict[str, Any]:
    kind, params = OPTIMIZERS[name]
    torchs = {"torch_adam": True} if kind in ("Adam", "AdamW") else {}
    return {"type": kind, "params": {**params, **torchs}}


@pytest.mark.proves(
    "optimizer.amsgrad",
    "optimizer.betas",
    "optimizer.decoupled",
    "optimizer.eps",
    "optimizer.kernel",
    "optimizer.lr",
    "optimizer.other",
    "optimizer.type",
    "optimizer.weight-decay",
    "zero.stage",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_steps_as_it_does_under_deepspeed(name):
    kind, params = OPTIMIZERS[name]
    stage = NOT_SHARDED.get(kind, 3 if params else 1)
    config = config_of(stage, "fp32", 1, optimizer=optimizer_of(name))
    about = [f for f in plan_of(config, 2).findings if f.key.startswith("optimizer")]
    assert {f.verdict for f in about} <= {"exact", "dead"}, about
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert loss_apart(mine, theirs) <= 1e-5
        assert furthest(mine, theirs) <= 1e-4
    if len(params) > 1:  # and the options are what did it
        plain = {"type": kind, "params": {"lr": params["lr"]}}
        run = native(config_of(stage, "fp32", 1, optimizer=plain), 2)
        other = shared_pool(2).run(train_curve, run, timeout_s=START_S)
        assert furthest(other[0], theirs) > 1e-3


KERNELS = {
    "FusedAdam": {},
    "CPUAdam": {"offload_optimizer": {"device": "cpu"}},
}


@pytest.mark.proves("optimizer.bias-correction")
@pytest.mark.parametrize("kernel", KERNELS)
def test_deepspeeds_own_kernels_are_a_rounding_apart_and_called_approximate(kernel):
    for kind, decoupled in (("AdamW", True), ("Adam", False)):
        params = {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": decoupled}
        params["bias_correction"] = True
        config = config_of(2, "fp32", 1, optimizer={"type": kind, "params": params})
        config["zero_optimization"] |= KERNELS[kernel]
        assert plan_of(config, 2).exit_code == 10
        for mine, theirs in zip(*both(config, 2), strict=True):
            assert loss_apart(mine, theirs) <= 1e-5
            assert furthest(mine, theirs) <= 1e-4


@pytest.mark.proves("offload.optimizer", "offload.parameters", "optimizer.kernel")
@pytest.mark.parametrize(
    ("stage", "precision"), [(1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16")]
)
def test_offloading_moves_no_number_where_torch_steps(stage, precision):
    config = config_of(stage, precision, 2, optimizer=ADAMW)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    about = [f for f in plan_of(config, 2).findings if "offload" in f.key or "torch_adam" in f.key]
    assert {f.verdict for f in about} == {"exact", "performance-only"}
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert loss_apart(mine, theirs) <= (0.0 if precision == "bf16" else 1e-5)
        assert furthest(mine, theirs) <= 1e-4


# -- schedules -------------------------------------------------------------------------------------

SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "log": ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.4, "warmup_num_steps": 3}),
    "linear": ("WarmupLR", {"warmup_num_steps": 3, "warmup_type": "linear"}),
    "decay": (
        "WarmupDecayLR",
        {"warmup_max_lr": 0.3, "warmup_num_steps": 2, "total_num_steps": 5},
    ),
    "cosine": (
        "WarmupCosineLR",
        {
            "warmup_num_steps": 2,
            "total_num_steps": 5,
            "cos_min_ratio": 0.2,
            "warmup_min_ratio": 0.1,
        },
    ),
    "one cycle": (
        "OneCycle",
        {
            "cycle_min_lr": 0.002,
            "cycle_max_lr": 0.02,
            "cycle_first_step_size": 2,
            "cycle_second_step_size": 1,
            "decay_step_size": 1,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
        },
    ),
    "range test": (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.05,
            "lr_range_test_step_size": 2,
            "lr_range_test_step_rate": 0.5,
        },
    ),
    "torch's steps": ("StepLR", {"step_size": 2, "gamma": 0.3}),
    "torch's one cycle": ("OneCycleLR", {"max_lr": 0.3, "total_steps": 6}),
}


@pytest.mark.proves(
    "optimizer.lr",
    "schedule.other",
    "schedule.total",
    "schedule.type",
    "schedule.warmup-range",
    "schedule.warmup-steps",
    "schedule.warmup-type",
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_update_of_a_schedule_is_deepspeeds(name):
    kind, params = SCHEDULES[name]
    for stage in (0,) if name.startswith("torch's") else (1, 2):
        optimizer = ADAMW if kind == "OneCycle" else SGD  # the one sets momentum, too
        scheduler = {"type": kind, "params": params}
        config = config_of(stage, "fp32", 1, optimizer=optimizer, scheduler=scheduler)
        assert plan_of(config, 2).exit_code == 0
        for mine, theirs in zip(*both(config, 2), strict=True):
            assert mine.rates == pytest.approx(theirs.rates, rel=1e-12, abs=1e-15)
            assert loss_apart(mine, theirs) <= 1e-5
            assert furthest(mine, theirs) <= (1e-4 if optimizer is ADAMW else FP32_BOUND)
        assert len(set(theirs.rates)) > 2


def test_the_momentum_of_one_cycle_is_seen():
    kind, params = SCHEDULES["one cycle"]
    config = config_of(2, "fp32", 1, optimizer=ADAMW, scheduler={"type": kind, "params": params})
    still = replace(native(config, 2).schedule, momentum=False)
    (mine, *_), (theirs, *_) = both(config, 2, schedule=still)
    assert mine.rates == pytest.approx(theirs.rates)
    assert furthest(mine, theirs) > 1e-3


# -- gradients and precision -----------------------------------------------------------------------

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


@pytest.mark.proves("gradients.prescale", "gradients.predivide", "zero.reduce-scatter")
@pytest.mark.parametrize(("_", "stage", "precision", "top", "zero"), DIVIDED)
def test_where_gradients_are_divided_moves_a_rounding_at_most(_, stage, precision, top, zero):
    config = config_of(stage, precision, 2, **top)
    config["zero_optimization"] |= zero
    for mine, theirs in zip(*both(config, 2), strict=True):
        assert loss_apart(mine, theirs) <= (0.0 if precision == "bf16" else FP32_BOUND)
        assert furthest(mine, theirs) <= (0.0 if precision == "bf16" else FP32_BOUND)


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


# -- four ranks ------------------------------------------------------------------------------------

ACCUMULATIONS = (1, 2, 3)
LOW = [
    (stage, name)
    for stage in STAGES
    for name in (*HALF, "fp16")
    if stage or name == "bf16"  # at stage 0 DeepSpeed adds up in bf16 alone, and fp16 is wrong
]


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


@pytest.mark.proves("gradients.dtype", "precision.accumulation", "precision.fp16", "zero.stage")
@pytest.mark.parametrize(("stage", "precision"), LOW)
def test_on_four_ranks_a_step_differs_by_the_roundings_of_a_sum_at_most(stage, precision):
    """Which of them there are depends on a value's place in its buffer: here and there another."""
    for accumulate in ACCUMULATIONS:
        config = config_of(stage, precision, accumulate)
        assert share_of_the_bound(config, native(config, 4)) <= 1.0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_that_is_too_long_is_beyond_them(precision):
    config = config_of(1, precision, 2)
    longer = {"type": "SGD", "params": {"lr": 1.3 * LR}}
    run = native({**config, "optimizer": longer}, 4)
    assert share_of_the_bound(config, run) > 1.0
