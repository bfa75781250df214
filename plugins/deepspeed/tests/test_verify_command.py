"""``verify --command`` of a line of deepspeed: under the engine, and by drop-in."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from torsh_trainer_deepspeed.operators import extensions_dir

from torsh_trainer.__main__ import main

pytestmark = pytest.mark.usefixtures("warm_interpreters")

SCRIPT = """
import argparse
import deepspeed
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
for epoch in range(3):
    for x, y in loader:
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "zero_optimization": {"stage": 1},
}


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """DeepSpeed's launcher, with the operators that are compiled already."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR", str(extensions_dir()))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", compiled)


def test_a_line_of_deepspeed_agrees_with_its_drop_in(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    Path("train.py").write_text(SCRIPT)
    Path("ds.json").write_text(json.dumps(CONFIG))
    line = "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds.json"
    assert main(["verify", "--command", line, "--steps", "5", "--dir", "kept"]) == 0
    out = capsys.readouterr().out
    assert "train.py: 5 steps of 2 processes, by drop-in beside the engine" in out
    assert len(re.findall(r" agrees", out)) == 4
    for run in ("engine", "drop-in"):
        rows = [
            json.loads(row)
            for row in Path("kept", run, "rank-1.jsonl").read_text().split("\n")[:-1]
        ]
        assert [row["step"] for row in rows] == list(range(6))
        assert [len(row["losses"]) for row in rows[1:]] == [2] * 5  # micro-batches of a step
        assert rows[0]["parameters"] != rows[1]["parameters"]


@pytest.fixture
def verify_launch(tmp_path, monkeypatch):
    """The words that compare a launch file of two jobs with its drop-in."""
    monkeypatch.chdir(tmp_path)
    Path("job").mkdir()
    Path("job", "train.py").write_text(SCRIPT)
    Path("job", "ds.json").write_text(json.dumps(CONFIG))
    Path("job", "run.sh").write_text(
        "touch was_run\nexport DS_ACCELERATOR=cpu OMP_NUM_THREADS=1\nGPUS=${1:-4}\n"
        "cd $(dirname $0)\n"
        "deepspeed --num_gpus $GPUS train.py --deepspeed --deepspeed_config ${DS:-'ds.json'}\n"
        "deepspeed --num_gpus 2 other.py\n"
    )
    return ["verify", "--launch", "job/run.sh", "--set", "1=2", "--steps", "3"]


def test_the_line_of_a_launch_file_is_taken_and_nothing_else_of_it_is_run(
    verify_launch, tmp_path, monkeypatch, capsys
):
    engine = tmp_path / "bin" / "deepspeed"
    engine.parent.mkdir()
    engine.write_text('#!/bin/sh\necho "$PWD: $DS_ACCELERATOR: $*" >"$0.ran"\nexit 7\n')
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}{os.pathsep}{os.environ['PATH']}")
    assert main(verify_launch) == 2
    assert "--job job/run.sh:5" in capsys.readouterr().err
    assert main([*verify_launch, "--job", "5"]) == 3
    asked = "--num_gpus 2 train.py --deepspeed --deepspeed_config ds.json"
    assert f"verify: deepspeed {asked}" in capsys.readouterr().out
    ran = Path(f"{engine}.ran").read_text()
    assert ran == f"{tmp_path}/job: cpu: {asked}\n"
    assert not Path("was_run").exists()
    assert not Path("job", "was_run").exists()


@pytest.mark.exhaustive  # as the line above, under the real engine
def test_the_line_of_a_launch_file_agrees_with_its_drop_in(verify_launch, capsys):
    assert main([*verify_launch, "--job", "5"]) == 0
    out = capsys.readouterr().out
    assert "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds.json" in out
    assert "train.py: 3 steps of 2 processes, by drop-in beside the engine" in out
    assert len(re.findall(r" agrees", out)) == 4
    assert not Path("was_run").exists()
