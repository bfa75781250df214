"""The loop on several processes, through the command line: stopping, resuming, failing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LONG = [
    "+recipe=digits",
    "strategy=ddp",
    "launcher.num_processes=2",
    "trainer.stages=[fit]",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "schedule=constant",
    "schedule.warmup_ratio=null",  # the warm-up must not depend on max_steps here
]


def rows(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl holds of training."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == "train"]


def started(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run in the background, once it has made its first steps."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torsh_trainer", *LONG, f"hydra.run.dir={folder}", *overrides],
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 480
    while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= 5):
        if process.poll() is not None or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            pytest.fail(f"the run did not start: {process.communicate()}")
        time.sleep(0.05)
    return process


def kill_group(process: subprocess.Popen[str]) -> None:
    """Ends whatever is left of a run, so that one that does not stop outlives no test."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.matrix(1)
def test_a_signal_to_the_parent_stops_all_ranks_after_one_step_with_a_checkpoint(
    number: int, code: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = started(folder, "trainer.max_steps=1000000")
    try:
        process.send_signal(number)
        _, error = process.communicate(timeout=240)
    finally:
        kill_group(process)
    assert process.returncode == code, error
    assert "Traceback" not in error
    last = rows(folder)[-1]["step"]
    assert [p.name for p in (folder / "checkpoints").glob("step-*")] == [f"step-{last:08d}"]
    told = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert told["error"]["type"] == "Interrupted"


@pytest.mark.exhaustive
def test_a_run_that_was_stopped_goes_on_on_the_same_curve(
    run_door: Any, warm_door: Any, tmp_path: Path
) -> None:
    def run(door: Any, folder: str, steps: int, **options: Any) -> None:
        overrides = [f"hydra.run.dir={tmp_path / folder}", f"trainer.max_steps={steps}"]
        done = door([*LONG, *overrides], timeout_s=960, **options)
        assert done.returncode == 0, done.stderr

    run(warm_door, "whole", 24, processes=2)
    run(warm_door, "parts", 11, processes=2)
    run(run_door, "parts", 24)  # in processes that have nothing of the first part
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row["step"] for row in parts] == list(range(1, 25))
    for mine, expected in zip(parts, whole, strict=True):
        # Across an epoch's ragged tail; DDP sums in another order right after a restart.
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert mine["samples"] == expected["samples"]


def test_a_loss_that_is_not_finite_is_one_sentence_and_exit_code_3(
    run_door: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    overrides = ["trainer.max_steps=50", "optimizer=sgd", "optimizer.lr=1e30"]
    done = run_door([*LONG, f"hydra.run.dir={folder}", *overrides], timeout_s=960)
    assert done.returncode == 3, done.stderr
    assert re.search(r"the loss is not finite .*first at step \d+", done.stderr)
    assert "Traceback" not in done.stderr
    told = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert told["error"]["type"] == "TrainingError"
    assert not list((folder / "checkpoints").glob("step-*"))


def test_early_stopping_ends_at_the_same_step_as_on_one_process(
    warm_door: Any, tmp_path: Path
) -> None:
    def stopped_at(processes: int) -> int:
        folder = tmp_path / str(processes)
        overrides = [
            f"hydra.run.dir={folder}",
            f"launcher.num_processes={processes}",
            "strategy=auto",
            "trainer.max_steps=400",
            # The same micro-batches on both, so that the same units drop out.
            "data.batch_size=64",
            "data.micro_batch_size=32",
            "trainer.eval_every=5",
            "callbacks.early_stopping.enabled=true",
            "callbacks.early_stopping.monitor=accuracy",
            "callbacks.early_stopping.mode=max",
            "callbacks.early_stopping.patience=1",
            "callbacks.early_stopping.min_delta=0.05",
        ]
        done = warm_door([*LONG, *overrides], processes=processes, timeout_s=960)
        assert done.returncode == 0, done.stderr
        steps: int = json.loads((folder / "result.json").read_text(encoding="utf-8"))["steps"]
        return steps

    alone = stopped_at(1)
    assert alone < 400
    assert stopped_at(2) == alone


@pytest.mark.exhaustive
def test_an_unused_parameter_is_named_by_ddp_and_allowed_when_asked(
    run_door: Any, warm_door: Any, tmp_path: Path
) -> None:
    (tmp_path / "spare.py").write_text(
        "from torch import nn\n"
        "from torsh_trainer.tasks.models import SmallCNN\n\n\n"
        "class Spare(SmallCNN):\n"
        "    def __init__(self) -> None:\n"
        "        super().__init__(image_size=8)\n"
        "        self.never_used = nn.Linear(2, 2)\n"
    )
    spare = [*LONG, "model=null", "+model._target_=spare.Spare", "trainer.max_steps=3"]
    refused = run_door(spare, timeout_s=960)
    assert refused.returncode == 2
    assert "never_used.weight" in refused.stderr
    words = [*spare, "strategy.find_unused_parameters=true"]
    allowed = warm_door(words, processes=2, timeout_s=960)
    assert allowed.returncode == 0, allowed.stderr
