"""DeepSpeed's schedulers in closed form: the rates of the library, update by update."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.schedule.deepspeed import (
    DeepSpeedOneCycle,
    DeepSpeedRangeTest,
    DeepSpeedWarmup,
)
from torsh_trainer.utils.lookup import import_object

pytestmark = pytest.mark.usefixtures("warm_interpreters")

UPDATES = 300
LR = 0.02

CASES = {
    "WarmupLR": ({}, {"start": 0.0}),
    "WarmupLR linear": (
        {"warmup_type": "linear", "warmup_min_lr": 0.002, "warmup_num_steps": 40},
        {"warmup": "linear", "start": 0.1, "warmup_steps": 40},
    ),
    "WarmupLR short": ({"warmup_num_steps": 1}, {"warmup_steps": 1}),
    "WarmupLR linear in 2": (
        {"warmup_type": "linear", "warmup_num_steps": 2},
        {"warmup": "linear", "warmup_steps": 2},
    ),
    "WarmupLR that is flat": (
        {"warmup_min_lr": LR, "warmup_max_lr": LR, "warmup_num_steps": 50},
        {"start": 1.0, "warmup_steps": 50},
    ),
    "WarmupLR that falls": (
        {"warmup_min_lr": 3 * LR, "warmup_max_lr": LR, "warmup_num_steps": 50},
        {"start": 3.0, "warmup_steps": 50},
    ),
    "WarmupLR longer than the run": ({"warmup_num_steps": 1000}, {"warmup_steps": 1000}),
    "WarmupDecayLR": (
        {"total_num_steps": 200, "warmup_max_lr": LR, "warmup_num_steps": 30},
        {"decay": "linear", "total_steps": 200, "warmup_steps": 30},
    ),
    "WarmupDecayLR from above 0": (
        {
            "total_num_steps": 250,
            "warmup_max_lr": LR,
            "warmup_min_lr": 0.005,
            "warmup_num_steps": 9,
        },
        {"decay": "linear", "total_steps": 250, "warmup_steps": 9, "start": 0.25},
    ),
    "WarmupDecayLR shorter than its warm-up": (
        {"total_num_steps": 20, "warmup_max_lr": LR, "warmup_num_steps": 50},
        {"decay": "linear", "total_steps": 20, "warmup_steps": 50},
    ),
    "WarmupDecayLR as long as its warm-up": (
        {
            "total_num_steps": 50,
            "warmup_max_lr": LR,
            "warmup_num_steps": 50,
            "warmup_type": "linear",
        },
        {"decay": "linear", "total_steps": 50, "warmup_steps": 50, "warmup": "linear"},
    ),
    "WarmupDecayLR of one update": (
        {"total_num_steps": 1, "warmup_max_lr": LR, "warmup_num_steps": 1},
        {"decay": "linear", "total_steps": 1, "warmup_steps": 1},
    ),
    "WarmupCosineLR shorter than its warm-up": (
        {"total_num_steps": 20, "warmup_num_steps": 50},
        {"decay": "cosine", "total_steps": 20, "warmup_steps": 50},
    ),
    "WarmupCosineLR in 2, to 0": (
        {"total_num_steps": 300, "warmup_num_steps": 2, "cos_min_ratio": 0.0},
        {"decay": "cosine", "total_steps": 300, "warmup_steps": 2, "final": 0.0},
    ),
    "WarmupCosineLR that is flat": (
        {
            "total_num_steps": 200,
            "warmup_num_steps": 10,
            "cos_min_ratio": 1.0,
            "warmup_min_ratio": 1.0,
        },
        {"decay": "cosine", "total_steps": 200, "warmup_steps": 10, "final": 1.0, "start": 1.0},
    ),
    "WarmupCosineLR": (
        {"total_num_steps": 220, "warmup_num_steps": 25},
        {"decay": "cosine", "total_steps": 220, "warmup_steps": 25},
    ),
    "WarmupCosineLR with ratios": (
        {
            "total_num_steps": 300,
            "warmup_num_steps": 12,
            "warmup_min_ratio": 0.2,
            "cos_min_ratio": 0.3,
            "warmup_type": "linear",
        },
        {
            "decay": "cosine",
            "total_steps": 300,
            "warmup_steps": 12,
            "start": 0.2,
            "final": 0.3,
            "warmup": "linear",
        },
    ),
}

CYCLES = {
    "OneCycle": ({"cycle_first_step_size": 60}, {"first_steps": 60}),
    "OneCycle lopsided": (
        {"cycle_first_step_size": 7, "cycle_second_step_size": 200},
        {"first_steps": 7, "second_steps": 200},
    ),
    "OneCycle without a way down": (
        {"cycle_first_step_size": 40, "cycle_second_step_size": 0},
        {"first_steps": 40, "second_steps": 0},
    ),
    "OneCycle of two updates": ({"cycle_first_step_size": 1}, {"first_steps": 1}),
    "OneCycle by its defaults": ({}, {}),
    "OneCycle that is flat": (
        {"cycle_min_lr": LR, "cycle_first_step_size": 30, "cycle_min_mom": 0.9},
        {"low": 1.0, "first_steps": 30, "low_momentum": 0.9},
    ),
    "OneCycle with stairs": (
        {
            "cycle_first_step_size": 50,
            "cycle_second_step_size": 80,
            "cycle_first_stair_count": 5,
            "cycle_second_stair_count": 3,
        },
        {"first_steps": 50, "second_steps": 80, "first_stairs": 5, "second_stairs": 3},
    ),
    "OneCycle with the same stairs down": (
        {"cycle_first_step_size": 30, "cycle_first_stair_count": 7},
        {"first_steps": 30, "first_stairs": 7},
    ),
    "OneCycle that decays": (
        {
            "cycle_first_step_size": 20,
            "cycle_second_step_size": 30,
            "decay_step_size": 10,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.01,
        },
        {
            "first_steps": 20,
            "second_steps": 30,
            "decay_steps": 10,
            "decay_rate": 0.5,
            "momentum_decay_rate": 0.01,
        },
    ),
    "OneCycle whose rate alone decays": (
        {"cycle_first_step_size": 20, "decay_step_size": 3, "decay_lr_rate": 0.1},
        {"first_steps": 20, "decay_steps": 3, "decay_rate": 0.1},
    ),
    "OneCycle without intervals of decay": (
        {"cycle_first_step_size": 20, "decay_lr_rate": 0.5, "decay_mom_rate": 0.5},
        {"first_steps": 20, "decay_rate": 0.5, "momentum_decay_rate": 0.5},
    ),
    "OneCycle without momentum": (
        {"cycle_first_step_size": 20, "cycle_momentum": False},
        {"first_steps": 20, "momentum": False},
    ),
    "OneCycle of other momenta": (
        {"cycle_first_step_size": 33, "cycle_min_mom": 0.5, "cycle_max_mom": 0.97},
        {"first_steps": 33, "low_momentum": 0.5, "high_momentum": 0.97},
    ),
}
RANGES = {
    "LRRangeTest": ({}, {}),
    "LRRangeTest fast": (
        {"lr_range_test_step_size": 7, "lr_range_test_step_rate": 3.5},
        {"step_size": 7, "step_rate": 3.5},
    ),
    "LRRangeTest by stairs": (
        {"lr_range_test_step_size": 9, "lr_range_test_staircase": True},
        {"step_size": 9, "staircase": True},
    ),
    "LRRangeTest that stays": ({"lr_range_test_step_rate": 0.0}, {"step_rate": 0.0}),
    "LRRangeTest at every update": (
        {"lr_range_test_step_size": 1, "lr_range_test_staircase": True},
        {"step_size": 1, "staircase": True},
    ),
}
LOWEST = 0.1 * LR

PROGRAM = """
import json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
out = os.dup(1)
os.dup2(2, 1)
import torch
from deepspeed.runtime import lr_schedules
found = {}
for name, options in json.loads(sys.argv[1]).items():
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=float(sys.argv[2]))
    try:
        scheduler = getattr(lr_schedules, name.split()[0])(optimizer, **options)
    except ValueError as error:
        found[name] = str(error)
        continue
    found[name] = []
    for _ in range(int(sys.argv[3])):
        group = optimizer.param_groups[0]
        found[name].append([group["lr"], *group["betas"]])
        optimizer.step()
        scheduler.step()
os.write(out, json.dumps(found).encode())
"""


@pytest.fixture(scope="module")
def library(run_command, tmp_path_factory) -> dict[str, list[list[float]]]:
    """Rate and betas of every update, by the library's own schedulers; or why there are none."""
    wanted = {name: options for name, (options, _) in CASES.items()}
    bounds = {"cycle_min_lr": LOWEST, "cycle_max_lr": LR}
    wanted |= {name: {**bounds, **options} for name, (options, _) in CYCLES.items()}
    wanted |= {
        name: {"lr_range_test_min_lr": LR, **options} for name, (options, _) in RANGES.items()
    }
    wanted["WarmupLR without warm-up"] = {"warmup_num_steps": 0}
    command = [sys.executable, "-c", PROGRAM, json.dumps(wanted), str(LR), str(UPDATES)]
    answer = run_command(command, cwd=tmp_path_factory.mktemp("library"))
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def rates_of(library, name):
    return [rate for rate, *_ in library[name]]


@pytest.mark.matrix(8)
@pytest.mark.proves(
    "schedule.total",
    "schedule.type",
    "schedule.warmup-range",
    "schedule.warmup-steps",
    "schedule.warmup-type",
)
@pytest.mark.parametrize("name", CASES)
def test_every_update_has_the_rate_of_the_library(name, library):
    schedule = DeepSpeedWarmup(**CASES[name][1])
    rates = [LR * schedule.factor(update, None) for update in range(UPDATES)]
    assert rates == pytest.approx(rates_of(library, name), rel=1e-12, abs=1e-15)


@pytest.mark.proves("schedule.other", "schedule.type")
@pytest.mark.parametrize("name", RANGES)
def test_a_range_test_has_the_rates_of_the_library(name, library):
    schedule = DeepSpeedRangeTest(**RANGES[name][1])
    rates = [LR * schedule.factor(update, None) for update in range(UPDATES)]
    assert rates == pytest.approx(rates_of(library, name), rel=1e-12, abs=1e-15)


@pytest.mark.proves("schedule.other", "schedule.type")
@pytest.mark.parametrize("name", CYCLES)
def test_one_cycle_has_the_rates_and_the_momentum_of_the_library(name, library):
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=LR)
    running = DeepSpeedOneCycle(**{"low": LOWEST / LR, **CYCLES[name][1]}).start({"": optimizer})
    group = optimizer.param_groups[0]
    for rate, *betas in library[name]:
        assert group["lr"] == pytest.approx(rate, rel=1e-12, abs=1e-15)
        assert group["betas"] == pytest.approx(tuple(betas), rel=1e-12)
        running.on_update()


def test_one_cycle_goes_on_where_it_was_saved():
    optimizers = [torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=LR) for _ in "ab"]
    knobs = DeepSpeedOneCycle(first_steps=10, decay_steps=2, decay_rate=0.5)
    first, second = (knobs.start({"": optimizer}) for optimizer in optimizers)
    for _ in range(7):
        first.on_update()
    second.load_state_dict(first.state_dict())
    for _ in range(20):
        groups = [optimizer.param_groups[0] for optimizer in optimizers]
        assert groups[0]["lr"] == groups[1]["lr"]
        assert groups[0]["betas"] == groups[1]["betas"]
        first.on_update()
        second.on_update()


def test_an_optimizer_without_betas_keeps_its_momentum():
    parameters = [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.5)
    running = DeepSpeedOneCycle(first_steps=3).start({"": optimizer})
    running.on_update()
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert "betas" not in optimizer.param_groups[0]


def test_the_library_refuses_a_warm_up_of_no_updates_which_counts_as_two_here(library):
    assert "positive integer" in library["WarmupLR without warm-up"]
    none, two = (DeepSpeedWarmup(warmup_steps=steps) for steps in (0, 2))
    assert all(none.factor(u, None) == two.factor(u, None) for u in range(UPDATES))


def test_the_usual_linear_warm_up_is_another_function(library):
    usual = [LR * (0.1 + 0.9 * min(1.0, update / 40)) for update in range(UPDATES)]
    assert usual != pytest.approx(rates_of(library, "WarmupLR linear"), rel=1e-6)


def test_a_decay_follows_the_run_where_no_total_is_given():
    schedule = DeepSpeedWarmup(decay="linear", warmup_steps=5)
    assert schedule.factor(91, 90) == 0.0
    assert schedule.factor(50, 90) > 0.0
    with pytest.raises(ConfigError, match="needs to know how many updates"):
        schedule.factor(50, None)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"warmup": "root"}, "log or linear"),
        ({"decay": "step"}, "none, linear or cosine"),
        ({"start": -0.1}, "0 or more"),
        ({"final": 2.0}, "between 0 and 1"),
        ({"warmup_steps": -1}, "0 or more updates"),
        ({"total_steps": 0}, "1 or more updates"),
    ],
)
def test_a_knob_out_of_its_range_is_refused(knobs, words):
    with pytest.raises(ConfigError, match=words):
        DeepSpeedWarmup(**knobs)


@pytest.mark.parametrize(
    ("schedule", "knobs", "words"),
    [
        (DeepSpeedRangeTest, {"step_size": 0}, "1 or more updates"),
        (DeepSpeedOneCycle, {"low": -1.0}, "0 or more"),
        (DeepSpeedOneCycle, {"first_steps": 0}, "more than 0 updates"),
        (DeepSpeedOneCycle, {"second_steps": -1}, "0 or more"),
        (DeepSpeedOneCycle, {"decay_steps": -1}, "0 or more"),
    ],
)
def test_so_is_one_of_the_others(schedule, knobs, words):
    with pytest.raises(ConfigError, match=words):
        schedule(**knobs)


def test_a_configuration_of_an_earlier_run_finds_its_schedule():
    for kind in (DeepSpeedOneCycle, DeepSpeedRangeTest, DeepSpeedWarmup):
        assert (
            import_object(f"torsh_trainer.optim.schedule.{kind.__name__}", option="schedule")
            is kind
        )
    with pytest.raises(ConfigError, match="DeepSpeedNothing"):
        import_object("torsh_trainer.optim.schedule.DeepSpeedNothing", option="schedule")
