"""A name that says that nothing is changed is believed only once the function has been read."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_task_cases import write

from torsh_trainer.__main__ import main

SCRIPT = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
import horovod.torch as hvd
from torch.utils.data import DataLoader, TensorDataset
from helpers import HELPER


def make_data():
    return TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))


def main():
    hvd.init()
    model = nn.Linear(4, 2)
    EARLY
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    loader = DataLoader(make_data(), batch_size=4)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        CALL


if __name__ == "__main__":
    main()
"""
LOUD = {
    "writes parameters": (
        "save_epoch(model)",
        "def save_epoch(model):\n    for p in model.parameters():\n        p.data.mul_(0.9)\n",
        3,
    ),
    "assigns data": (
        "log_all(model)",
        "def log_all(m):\n    for _, p in m.named_parameters():\n        p.data = p.data * 0.9\n",
        3,
    ),
    "below": (
        "score = evaluate(model)",
        "def inner(m):\n    m.load_state_dict({})\n\ndef evaluate(model):\n    inner(model)\n",
        2,
    ),
    "freezes": (
        "validate(model)",
        "def validate(model):\n    model.weight.requires_grad = False\n",
        2,
    ),
    "steps": (
        "test_it(optimizer)",
        "def test_it(optimizer):\n    optimizer.step()\n",
        2,
    ),
}
QUIET = {
    "evaluates": (
        "score = evaluate(model, loader)",
        (
            "import torch\n\n\ndef evaluate(model, loader):\n    model.eval()\n    total = 0.0\n"
            "    with torch.no_grad():\n        for x, y in loader:\n"
            "            total += (model(x).argmax(1) == y).sum().item()\n"
            "    for p in model.parameters():\n        total += p.norm().item()\n"
            "    model.train()\n    return total\n"
        ),
    ),
    "saves": (
        "save_checkpoint(model, optimizer)",
        (
            "import torch\n\n\ndef save_checkpoint(model, optimizer):\n"
            "    torch.save({'model': model.state_dict(), 'o': optimizer.state_dict()}, 'x')\n"
        ),
    ),
    "logs": (
        "log_epoch(epoch)",
        "def log_epoch(epoch):\n    print(epoch)\n",
    ),
}


@pytest.fixture
def translate(tmp_path, monkeypatch, capsys):
    def run(call: str, helpers: str, early: str = "pass") -> tuple[int, str, str]:
        name = call.rpartition("=")[2].strip().partition("(")[0]
        name = name if early == "pass" else early.rpartition("= ")[2].partition("(")[0]
        script = SCRIPT.replace("CALL", call).replace("HELPER", name).replace("EARLY", early)
        write(tmp_path, {"train.py": script, "helpers.py": helpers})
        monkeypatch.chdir(tmp_path)
        words = [
            "train.py",
            "--world-size",
            "1",
            "--task",
            "my_task.py",
            "--output",
            "j.yaml",
            "--force",
        ]
        code = main(["translate", *words])
        return code, capsys.readouterr().out, Path("my_task.py").read_text()

    return run


@pytest.mark.parametrize("case", LOUD)
def test_one_that_trains_or_writes_is_named_with_both_places(translate, case):
    call, helpers, line = LOUD[case]
    code, told, text = translate(call, helpers)
    assert code == 13
    [place] = [row for row in told.splitlines() if "as if it changed nothing" in row]
    assert "train.py:27: " in place
    assert f"helpers.py:{line}: " in place
    assert "fill_in('train.py:27: " in text.replace('"', "'")


@pytest.mark.parametrize("case", QUIET)
def test_one_that_only_looks_is_not(translate, case):
    call, helpers = QUIET[case]
    code, told, text = translate(call, helpers)
    assert code in (0, 10)
    assert "nothing is missing" in told
    assert "fill_in" not in text


@pytest.mark.parametrize("early", ["initialize(model)", "made = initialize(model)"])
def test_one_that_writes_before_the_training_is_carried_over(translate, early):
    helpers = "def initialize(model):\n    model.weight.data.fill_(0.5)\n    return model\n"
    _, _, text = translate("pass", helpers, early=early)
    assert "initialize(model)" in text
    plain = "def initialize(model):\n    print(model)\n"
    _, _, text = translate("pass", plain, early=early)
    assert "initialize" not in text
