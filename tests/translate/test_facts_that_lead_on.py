"""A table of facts says where more may be asked for, and is silent where it is all."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_trainer.__main__ import main

SCRIPT = """\
import argparse
import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_on", action="store_true")
parser.add_argument("--lr", type=float, required=True)
args = parser.parse_args()
model = torch.nn.Linear(4, 2)
if args.deepspeed_on:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": args.lr}},
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for x in data:
        engine.backward(engine(x).sum())
        engine.step()
"""


@pytest.fixture
def translate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)

    def run(*words: str) -> tuple[int, str]:
        code = main(["translate", *words])
        return code, capsys.readouterr().out

    return run


def test_a_condition_may_hold_more_and_the_rest_is_then_all(translate):
    code, said = translate("train.py")
    assert code == 13
    more = "what is read once args.deepspeed_on is known may ask for more"
    assert more in said
    code, said = translate("train.py", "--set", "args.deepspeed_on=true")
    assert code == 13
    assert "optimizer.params.lr" in said  # it does, as was said
    assert "may ask for more" not in said
    settings = ["--set", "args.deepspeed_on=true", "--set", "optimizer.params.lr=0.1"]
    code, said = translate("train.py", *settings)
    assert code == 0
    assert "missing, and only you know it" not in said


def test_so_may_a_file_and_a_variable_may_not(translate, tmp_path):
    line = "torchrun --nproc_per_node $GPUS other.py --save_strategy no --bf16 --learning_rate 1e-4"
    code, said = translate("--command", line)
    assert (code, "may ask for more" in said) == (13, False)
    code, said = translate("--command", f"{line} --deepspeed ds.json", "--report", "r.html")
    assert (code, "what is read once deepspeed is known may ask for more" in said) == (13, True)
    assert "may ask for more" in Path("r.html").read_text()
