"""Scripts for DeepSpeed under drop-in: what is read of them before, refusals, and one short run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.dropin import script
from torsh_trainer.dropin.deepspeed_line import read_deepspeed_command
from torsh_trainer.dropin.missing import make_missing_module
from torsh_trainer.dropin.names import ENGINES
from torsh_trainer.dropin.zero import saving
from torsh_trainer.errors import ConfigError, Unsupported

pytestmark = pytest.mark.usefixtures("warm_interpreters")

DEEPSPEED = ENGINES["deepspeed"]


def look_at(folder: Path, text: str) -> script.Script:
    path = folder / "train.py"
    path.write_text(text)
    return script.read(path)


@pytest.mark.parametrize("module", DEEPSPEED.public)
def test_every_name_of_the_table_is_there_and_no_other(module):
    ours = importlib.import_module(".".join(filter(None, (DEEPSPEED.root, module))))
    for name in DEEPSPEED.public[module]:
        assert getattr(ours, name) is not None
    with pytest.raises(AttributeError, match="is not there under drop-in; see docs"):
        ours.nope  # noqa: B018


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import deepspeed\ndeepspeed.nope()\n", "train.py:2: deepspeed.nope is not there"),
        (
            "from deepspeed.pipe import PipelineModule\nPipelineModule(layers, 2)\n",
            "train.py:2: deepspeed.pipe.PipelineModule is for pipelines",
        ),
        (
            "from deepspeed.pipe import PipelineModule\nclass Net(PipelineModule):\n    pass\n",
            "train.py:2: deepspeed.pipe.PipelineModule is for pipelines",
        ),
        ("import deepspeed\ndeepspeed.init_inference(m)\n", "train.py:2: deepspeed.init_inference"),
        ("import deepspeed\nx = deepspeed.moe.layer.MoE()\n", "is for mixtures of experts"),
        (
            "from deepspeed.ops.lamb import FusedLamb\nFusedLamb.step\n",
            "train.py:2: deepspeed.ops.lamb.FusedLamb is not",
        ),
        (
            "import deepspeed\ndef f():\n    deepspeed.zero.nope\n",
            "train.py:3: deepspeed.zero.nope",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_its_line(tmp_path, text, words):
    with pytest.raises(ConfigError) as refusal:
        look_at(tmp_path, text)
    assert words in str(refusal.value)


def test_what_may_never_be_reached_is_left_to_its_use(tmp_path):
    found = look_at(
        tmp_path,
        "import deepspeed\nparser.add_argument('--local_rank')\nif moe:\n    deepspeed.moe.layer\n"
        "def f():\n    from deepspeed.moe.utils import g\n"
        "from deepspeed.pipe import PipelineModule\n"
        "def build():\n    return PipelineModule(layers, 2)\n",
    )
    assert found.uses == ("deepspeed",)
    assert found.takes_local_rank


def test_a_module_that_is_not_there_is_imported_and_refuses_at_its_use():
    """Scripts import more than they use: DeepSpeed's own CIFAR example does."""
    module = make_missing_module("deepspeed.moe.layer", DEEPSPEED)
    words = "deepspeed.moe.layer.MoE is for mixtures of experts, which drop-in does not have"
    assert not isinstance(torch.nn.Linear(1, 1), module.MoE)
    uses = [
        lambda: module.MoE(hidden_size=8),
        lambda: module.MoE.forward,
        lambda: type("Own", (module.MoE,), {}),
    ]
    for use in uses:
        with pytest.raises(Unsupported, match=words):
            use()


@pytest.mark.parametrize(
    ("line", "processes", "arguments"),
    [
        ("deepspeed --num_gpus 2 train.py --deepspeed_config ds.json", 2, "--deepspeed_config"),
        ("deepspeed --include localhost:0,1 --master_port 1 train.py -e 3", 2, "-e"),
        ("python -m deepspeed.launcher.runner --num_gpus=3 train.py", 3, None),
    ],
)
def test_a_line_of_deepspeed_is_an_order(line, processes, arguments):
    order = read_deepspeed_command(line, env={})
    assert order is not None
    assert (order.processes, order.passes_local_rank) == (processes, True)
    assert str(order.script) == "train.py"
    assert arguments is None or order.arguments[0] == arguments


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("deepspeed --hostfile hosts train.py", "other hosts"),
        ("deepspeed --num_gpus $N train.py", "only a shell knows $N"),
        ("deepspeed --bogus 1 train.py", "no option --bogus"),
        ("deepspeed --autotuning run train.py", "--autotuning is not there"),
        ("deepspeed --include localhost:1,2 train.py", "leaves devices out"),
        ("CUDA_VISIBLE_DEVICES=1 deepspeed train.py", "CUDA_VISIBLE_DEVICES"),
        ("deepspeed --module train", "no script that is a file"),
    ],
)
def test_a_line_that_cannot_be_honoured_is_refused(line, words):
    with pytest.raises(ConfigError) as refusal:
        read_deepspeed_command(line, env={})
    assert words in str(refusal.value)


def test_a_line_of_another_launcher_is_left():
    assert read_deepspeed_command("horovodrun -np 2 python train.py", env={}) is None


SCRIPT = """
import argparse, json, sys
import deepspeed, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
parser.add_argument("--ask", default="")
args = parser.parse_args()
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
engine, optimizer, _, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=net.parameters())
if args.ask:
    eval(args.ask)
for step in range(2):
    for micro in range(2):
        x = torch.arange(6.0).view(2, 3) + engine.global_rank + 2 * micro
        engine.backward(engine(x / 10).square().mean())
        engine.step()
if engine.global_rank == 0:
    print("FOUND", json.dumps([args.local_rank, engine.global_steps, net.weight.tolist()]))
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,  # DeepSpeed's default is 1
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def drop_in(folder: Path, config: dict, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "ds.json").write_text(json.dumps(config))
    line = "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds.json"
    return subprocess.run(
        [sys.executable, "-m", "torsh_trainer", "drop-in", "--command", " ".join([line, *words])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_line_of_deepspeed_trains_as_plain_torch_on_the_whole_batch(tmp_path):
    import torch

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parts = [torch.arange(6.0).view(2, 3) + rank + 2 * m for rank in range(2) for m in range(2)]
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.cat(parts) / 10).square().mean().backward()
        optimizer.step()
    done = drop_in(tmp_path, CONFIG)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(one for one in done.stdout.splitlines() if one.startswith("FOUND"))
    local_rank, steps, weight = json.loads(line.removeprefix("FOUND"))
    assert (local_rank, steps) == (0, 2)
    assert torch.allclose(torch.tensor(weight), net.weight, atol=1e-6)


def test_a_key_that_is_refused_by_the_translator_is_refused_before_training(tmp_path):
    config = {**CONFIG, "optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}
    done = drop_in(tmp_path, config)
    assert done.returncode != 0
    assert "optimizer.type: not in this release: LAMB" in done.stderr
    assert "FOUND" not in done.stdout


@pytest.mark.exhaustive
def test_an_attribute_that_is_not_there_is_refused_where_it_is_used(tmp_path):
    done = drop_in(tmp_path, CONFIG, "--ask", "engine.train_batch")
    assert done.returncode != 0
    assert "engine.train_batch is neither the model's nor there under drop-in" in done.stderr


def test_a_checkpoint_that_would_run_code_is_refused_in_a_sentence(tmp_path):
    class Code:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"size": 1, "engine": {}, "beside": Code()}, tmp_path / "rank-0.pt")
    with pytest.raises(ConfigError, match=r"holds \S+, which only running code"):
        saving.load(tmp_path, None, LocalCommunicator(torch.device("cpu")))
    assert not (tmp_path / "ran").exists()
