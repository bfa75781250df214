"""What can be wrong with GPUs, typed at the door: one sentence, before anything is built.

The torch of the tests has no CUDA, so its answers are patched, as it gives them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOUND_NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver by downloading and installing a new version from the URL"
)
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}
SMI = """#!/bin/sh
echo "GPU-7b61, 4711, 40000, /usr/bin/python3"
"""


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with ``count`` GPUs, or a CUDA that does not start, for the reason in ``words``."""

    def patched(count: int = 0, words: str = "", **environment: str) -> None:
        def init() -> None:
            raise RuntimeError(words)

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        properties = SimpleNamespace(uuid="7b61")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "init", init)

    return patched


def refused(door: Any, *args: str) -> str:
    """The one line that is said, and nothing was trained."""
    answer = door("+recipe=quick.yaml", *args)
    assert answer.code in (1, 2), answer
    (line,) = answer.err.splitlines()
    assert answer.out == ""
    return line


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        (FOUND_NO_DRIVER, {}, "no NVIDIA driver is loaded on this host; install one"),
        (TOO_OLD, {}, f"serves CUDA to 12.2: too old for torch {torch.__version__}; update it"),
        (
            "No CUDA GPUs are available",
            {"CUDA_VISIBLE_DEVICES": "7"},
            "CUDA_VISIBLE_DEVICES=7 names no GPU of this host; choose among those that nvidia-smi",
        ),
        (
            "No CUDA GPUs are available",
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "CUDA_VISIBLE_DEVICES=-1 hides every GPU; unset CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_a_cuda_that_does_not_start_is_said_with_the_way_out(
    door: Any, say: Any, words: str, environment: dict[str, str], told: str
) -> None:
    say(words=words, **environment)
    line = refused(door, "trainer.device=cuda")
    assert line.startswith("error: trainer.device=cuda: ")
    assert told in line


def test_a_gpu_that_another_process_has_filled_is_refused_with_its_name(
    door: Any, say: Any, home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(count=1)
    script = home / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(SMI)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    empty = torch.empty

    def full(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "cpu")).startswith("cuda"):
            raise torch.AcceleratorError("CUDA error: out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", full)
    line = refused(door)
    assert "cuda:0 is full: pid 4711 (python3, 41.9 GB); end that process" in line


def test_more_ranks_than_gpus_name_the_option_of_the_scheduler(door: Any, say: Any) -> None:
    say(count=2, **SLURM)
    line = refused(door, "strategy=ddp")
    assert "4 processes on this host, and each sees 2 GPUs" in line
    assert "give Slurm --ntasks-per-node=2, or --gpus-per-task=1" in line


@pytest.mark.parametrize("strategy", ["nccl", "dp"])
def test_a_strategy_of_gpus_is_refused_on_a_cpu(door: Any, strategy: str) -> None:
    line = refused(door, f"strategy={strategy}", "trainer.device=cpu")
    assert strategy in line
    assert "; " in line, "a next move"
