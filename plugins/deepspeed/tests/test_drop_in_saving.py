"""What scripts save of a model that ZeRO has cut is what they save under the real DeepSpeed."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest
from dropping_in import read, run, same

from torsh_trainer.testing.compare import FP32

KEPT = ("by_parameter_low", "all_at_once", "consolidated", "in_one_file_3", "in_no_file")
MORE = (
    "by_parameter",
    "all_at_once_low",
    "trained",
    "in_one_file_0",
    "in_one_file_1",
    "in_one_file_2",
)
WRITES_NOTHING = """\
import deepspeed, torch
net = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config={
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
})
torch.save(net.state_dict(), "part.bin")
try:
    with deepspeed.zero.GatheredParameters(net.weight, modifier_rank=0):
        net.weight.data.zero_()
except Exception as error:
    print("refused:", error)
"""


@cache
def everything(names: tuple[str, ...], real: bool) -> Path:
    return run(tuple(f"saving_{name}" for name in names), real=real)


def compare(names: tuple[str, ...], name: str) -> None:
    found = [read(everything(names, real), f"saving_{name}") for real in (True, False)]
    for real, mine in zip(*found, strict=True):
        if name == "in_one_file_0":  # DeepSpeed's own parameters are in bf16 there
            real["state"] = mine["state"] = {}
        same(real, mine, FP32.parameters)
    (theirs, ours) = (one[0]["saved"] for one in found)
    assert [row[:3] for row in theirs] == [row[:3] for row in ours]
    assert bool(ours) is (name != "in_no_file")


@pytest.mark.parametrize("name", KEPT)
def test_what_is_saved_is_deepspeeds(name):
    compare(KEPT, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE)
def test_what_is_saved_in_other_ways_is_deepspeeds(name):
    compare(MORE, name)


def test_parts_are_not_saved_and_the_job_says_so(tmp_path, warm_python):
    (tmp_path / "train.py").write_text(WRITES_NOTHING)
    said = subprocess.run(
        [warm_python, "-m", "torsh_trainer", "drop-in", "-np", "1", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert said.returncode != 0
    assert "part.bin is not written yet" in said.stdout
    assert "refused: parameters that stage 3 has cut are set" in said.stdout
    assert "part.bin was not written" in said.stderr
    assert not (tmp_path / "part.bin").exists()
