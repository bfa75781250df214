"""Optimizers and schedules of a translation, beside DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from beside_deepspeed import ADAMW, SGD, START_S, both, config_of, native, plan_of

from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.trial import (
    FP32_BOUND,
    furthest,
    loss_apart,
    train_curve,
)

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


@pytest.mark.matrix(3)
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


@pytest.mark.matrix(1)
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


@pytest.mark.matrix(2)
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


@pytest.mark.matrix(2)
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
