"""Scripts as people write them: helpers in other modules, options in files, reduction by hand."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from horovod_job import BY_HAND

from torsh_trainer.__main__ import main
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.engines import work_of
from torsh_trainer.translate.plan import Plan

proves = partial(pytest.mark.proves, engine="horovod")

HELPERS = """\
import torch
import horovod.torch as hvd

def all_reduce_and_rescale(tensors, factor):
    buffer = torch.cat([t.view(-1) for t in tensors])
    hvd.allreduce_(buffer)
    buffer.div_(factor)

def rate_of(args):
    return args.lr * hvd.size()
"""
TRAIN = """\
import argparse
import numpy as np
import torch
import torch.nn.functional as F
import horovod.torch as hvd
from tools.helpers import all_reduce_and_rescale, rate_of
from tools import other

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.0125)
parser.add_argument("--accumulate", type=int, default=4)
args = parser.parse_args()
hvd.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
loader = torch.utils.data.DataLoader(other.data(), batch_size=8)
for epoch in range(3):
    for step, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / args.accumulate).backward()
        if (step + 1) % args.accumulate == 0:
            grads = [p.grad.data for p in model.parameters() if p.grad is not None]
            all_reduce_and_rescale(grads, float(1))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
"""
CONFIGURED = """\
import argparse
import json
import torch
import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
args = parser.parse_args()
with open(args.config) as file:
    config = json.load(file)
hvd.init()
model = torch.nn.Linear(4, 4)
more = config["more"]
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=more["momentum"])
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for batch in torch.utils.data.DataLoader([], batch_size=config.get("batch", 2)):
    model(batch).sum().backward()
    optimizer.step()
"""


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path = path.with_name(path.name + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def plan_of(path: Path, **options) -> Plan:
    return work_of(path, TranslationRequest(**options)).translate()


def test_a_helper_of_the_project_reduces_and_its_line_is_named(tmp_path):
    write(tmp_path, train=TRAIN.replace("RATE", "rate_of(args)"), tools__helpers=HELPERS)
    write(tmp_path, tools__other="def data():\n    return []\n")
    plan = plan_of(tmp_path / "train.py", world_size=4)
    assert plan.values["optimizer.lr"] == pytest.approx(0.05)
    assert plan.values["trainer.accumulate"] == 4
    assert "strategy.backward_passes_per_step" not in plan.values  # the script divides: a mean
    assert plan.values["trainer.max_grad_norm"] == 1.0
    [reduced] = [f for f in plan.findings if f.key == "hvd.allreduce_"]
    assert (reduced.verdict, reduced.where) == ("exact", "tools/helpers.py:6")
    assert {Path(name).name for name in plan.files} == {"helpers.py", "other.py"}


def test_a_rate_that_no_number_of_processes_has_in_common_is_asked_for_once(tmp_path, capsys):
    write(tmp_path, train=TRAIN.replace("RATE", "args.lr * np.sqrt(hvd.size())"))
    write(tmp_path, tools__helpers=HELPERS, tools__other="data = list\n")
    [fact] = plan_of(tmp_path / "train.py").facts
    assert (fact.name, fact.value) == ("world_size", "N")
    assert main(["translate", str(tmp_path / "train.py"), "--set", "world_size=4"]) == 10
    assert "optimizer.lr=0.025" in capsys.readouterr().out
    assert main(["translate", str(tmp_path / "train.py"), "--set", "world_size=x"]) == 2


def test_a_module_that_cannot_be_read_leaves_its_names_open(tmp_path):
    write(tmp_path, train=TRAIN.replace("RATE", "rate_of(args)"), tools__helpers="def x(:\n")
    with pytest.raises(ConfigError, match="as far as reading gets it reduces no"):
        plan_of(tmp_path / "train.py", world_size=2)


def test_options_in_a_file_are_read_or_the_file_is_asked_for(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CONFIGURED)
    [fact] = plan_of(path, world_size=2).facts
    assert (fact.name, fact.value, fact.line) == ("args.config", "FILE", 10)
    (tmp_path / "c.json").write_text('{"lr": 0.2, "more": {"momentum": 0.8}}')
    plan = plan_of(path, world_size=2, settings={"args.config": "c.json"})
    assert plan.facts == ()
    assert plan.values["optimizer.lr"] == 0.2
    assert plan.values["optimizer.momentum"] == 0.8
    assert plan.values["data.micro_batch_size"] == 2
    [gone] = plan_of(path, world_size=2, settings={"args.config": "gone.json"}).facts
    assert "it is not here" in gone.look


@proves("unused.by-hand")
def test_a_parameter_without_a_gradient_is_not_stepped_where_the_script_reduces(tmp_path):
    """A definition: what has no gradient, an optimizer of torch leaves as it is."""
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([used, unused], lr=0.1, momentum=0.9, weight_decay=0.1)
    used.sum().backward()
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    path = tmp_path / "train.py"
    path.write_text(BY_HAND)
    values = plan_of(path, world_size=2).values
    assert values["strategy.find_unused_parameters"] is True
    assert "strategy.zero_unused" not in values


STRANGERS = {
    "import pytorch_lightning as pl\n": "trains by Lightning; give its Trainer strategy=Torsh",
    "from transformers import Trainer\n": "trains by Hugging Face's Trainer",
    "import os, accelerate\n": "trains by accelerate",
    "from tensorflow import keras\n": "does not train torch",
    "import torch\nloss.backward()\n": "trains plain torch, without an engine to translate",
    "import torch\n": "calls no backward: what trains, if anything, stands in other files",
    "import torch\n__import__('horovod.torch')\nloss.backward()\n": "speaks of horovod, and",
    "import os\n": "imports no engine that is known here",
    "import horovod.torch as hvd\nprint 'x'\n": "a script of Python 2 has to be converted first",
}


@pytest.mark.parametrize("text", STRANGERS)
def test_a_script_that_is_nobodys_is_told_what_it_is(text, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(text)
    assert main(["translate", str(path)]) == 2
    assert STRANGERS[text] in capsys.readouterr().err


def test_the_code_cells_of_a_notebook_are_a_script(tmp_path, capsys):
    path = tmp_path / "train.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["import horovod.torch"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install x\n"]},
        {"cell_type": "code", "source": BY_HAND.splitlines(keepends=True)},
    ]
    path.write_text(json.dumps({"cells": cells}))
    plan = plan_of(path, world_size=2)
    assert plan.values["optimizer.lr"] == 0.1
    [reduced] = [f for f in plan.findings if f.key == "hvd.allreduce_"]
    line = 1 + [text.strip() for text in BY_HAND.splitlines()].index(
        "hvd.allreduce_(parameter.grad)"
    )
    assert reduced.line == 3 + line  # two lines of the kernel's, and one between
    assert any("code cells" in note for note in plan.notes)
    path.write_text("{")
    assert main(["translate", str(path)]) == 2
    assert "is no notebook" in capsys.readouterr().err
