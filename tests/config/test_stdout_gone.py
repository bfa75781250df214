"""Standard output that goes away while a run trains: the run does not go with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_trainer.rundir.output import outliving_stdout

pytestmark = pytest.mark.usefixtures("warm_interpreters")

SHOWN = (
    "+recipe=quick.yaml",
    "callbacks.console.enabled=true",
    "trainer.log_every=1",
    "hydra.run.dir=out",
)
LOCAL = ("launcher=local", "launcher.num_processes=2", "strategy=ddp")


def logs_of(run: Path) -> str:
    return "".join(file.read_text() for file in sorted((run / "logs").iterdir()))


def run_into(stdout, *args: str, cwd: Path, stderr=subprocess.PIPE):
    command = [sys.executable, "-m", "torsh_trainer", *SHOWN, *args]
    return subprocess.run(
        command, cwd=cwd, stdout=stdout, stderr=stderr, text=True, timeout=240, check=False
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("args", "both"), [((), True), (LOCAL, False)], ids=["stderr too", "two ranks"]
)
def test_a_reader_that_leaves_ends_no_run(args, both, home):
    reader, writer = os.pipe()
    os.close(reader)
    ended = run_into(writer, *args, cwd=home, stderr=writer if both else subprocess.PIPE)
    os.close(writer)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((home / "out" / "result.json").read_text())["steps"] == 2
    assert (home / "out" / "checkpoints" / "step-00000002").is_dir()
    assert logs_of(home / "out").count("standard output is gone (Broken pipe)") == 1


def test_a_full_disk_behind_stdout_ends_no_run(home):
    with Path("/dev/full").open("w") as full:
        ended = run_into(full, cwd=home)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((home / "out" / "result.json").read_text())["steps"] == 2
    assert "standard output is gone (No space left on device)" in logs_of(home / "out")


def test_what_a_task_prints_is_dropped_too_and_stdout_is_put_back(monkeypatch, caplog):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with outliving_stdout(), outliving_stdout():
            for _ in range(3):
                print("x" * 100_000, flush=True)
            sys.stdout.writelines(["a", "b"])
            assert not sys.stdout.isatty()
        assert sys.stdout is stream
    assert caplog.text.count("standard output is gone") == 1
