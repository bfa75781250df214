"""A variable that a launch file exports gets a verdict by who reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.launch.translator import LaunchTranslator

LINE = "torchrun --nproc_per_node 2 train.py\n"


def finding_of(text: str, name: str, script: str = "import torch\n"):
    Path("train.py").write_text(script)
    Path("run.sh").write_text(text)
    [plan] = LaunchTranslator().translate_jobs(Path("run.sh"), TranslationRequest())
    [found] = [one for one in plan.findings if one.key == name]
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "verdict", "why"),
    [
        ("OMP_NUM_THREADS=4", "performance-only", "keep the export around the command below"),
        ("NCCL_SOCKET_IFNAME=eth0", "performance-only", "connections"),
        ("CUDA_VISIBLE_DEVICES=0,1", "exact", "which devices"),
        ("NVIDIA_TF32_OVERRIDE=1", "exact", "how numbers are computed"),
        ("WANDB_PROJECT=x", "exact", "no number of a step"),
        ("WORLD_SIZE=4", "dead", "leave it out around the command below"),
        ("DS_SKIP_CUDA_CHECK=1", "dead", "DeepSpeed alone reads it"),
        ("EPOCHS=3", "yours", "nothing that is known here reads it"),
        ("FSDP_SHARDING_STRATEGY=1", "refused", "accelerate takes its engine"),
    ],
)
def test_it_is_told_who_reads_it(text, verdict, why):
    name = text.partition("=")[0]
    found = finding_of(f"export {text}\n{LINE}", name)
    assert (found.verdict, found.line) == (verdict, 1)
    assert why in found.why


def test_one_that_the_file_makes_its_line_of_stands_in_the_line():
    text = "export DS_CONFIG=ds.json\n" + LINE.replace("\n", " --config ${DS_CONFIG}\n")
    assert finding_of(text, "DS_CONFIG").verdict == "dead"
    assert finding_of(f"export DS_CONFIG=ds.json\n{LINE}", "DS_CONFIG").verdict == "yours"


def test_one_that_the_script_reads_is_yours_whatever_else_it_is():
    script = "import os\nlr = float(os.environ['OMP_NUM_THREADS']) * 0.1\n"
    text = f"export OMP_NUM_THREADS=4\n{LINE}"
    found = finding_of(text, "OMP_NUM_THREADS", script)
    assert (found.verdict, "the script reads it" in found.why) == ("yours", True)


def test_one_before_the_line_stands_before_the_command():
    found = finding_of(f"OMP_NUM_THREADS=4 {LINE}", "OMP_NUM_THREADS")
    assert found.why.endswith("it stands before the command below")
