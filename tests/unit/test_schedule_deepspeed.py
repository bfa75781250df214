"""DeepSpeed's warm-ups: the same rates as the schedulers of the library, update by update."""

from __future__ import annotations

import json
import sys

import pytest

from torsh_trainer.errors import ConfigError
from torsh_trainer.schedule import DeepSpeedWarmup

UPDATES = 300
LR = 0.02

CASES = {
    "WarmupLR": ({}, {"start": 0.0}),
    "WarmupLR linear": (
        {"warmup_type": "linear", "warmup_min_lr": 0.002, "warmup_num_steps": 40},
        {"warmup": "linear", "start": 0.1, "warmup_steps": 40},
    ),
    "WarmupLR short": ({"warmup_num_steps": 1}, {"warmup_steps": 1}),
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

PROGRAM = """
import json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
out = os.dup(1)
os.dup2(2, 1)
import torch
from deepspeed.runtime import lr_schedules
found = {}
for name, options in json.loads(sys.argv[1]).items():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=float(sys.argv[2]))
    scheduler = getattr(lr_schedules, name.split()[0])(optimizer, **options)
    found[name] = []
    for _ in range(int(sys.argv[3])):
        found[name].append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
os.write(out, json.dumps(found).encode())
"""


@pytest.fixture(scope="module")
def library(run_command, tmp_path_factory) -> dict[str, list[float]]:
    """The rate of every update, by the library's own schedulers."""
    wanted = json.dumps({name: options for name, (options, _) in CASES.items()})
    command = [sys.executable, "-c", PROGRAM, wanted, str(LR), str(UPDATES)]
    answer = run_command(command, cwd=tmp_path_factory.mktemp("library"))
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize("name", CASES)
def test_every_update_has_the_rate_of_the_library(name, library):
    schedule = DeepSpeedWarmup(**CASES[name][1])
    rates = [LR * schedule.factor(update, None) for update in range(UPDATES)]
    assert rates == pytest.approx(library[name], rel=1e-12, abs=1e-15)


def test_the_usual_linear_warm_up_is_another_function(library):
    usual = [LR * (0.1 + 0.9 * min(1.0, update / 40)) for update in range(UPDATES)]
    assert usual != pytest.approx(library["WarmupLR linear"], rel=1e-6)


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
