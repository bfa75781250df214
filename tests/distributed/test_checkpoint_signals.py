"""Two ranks under the command line, asked to stop at the worst moment; and two runs in one folder.

What is held up waits for signals that have come, not for a time: see ``HELD``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from torsh_trainer import Callback, CheckpointOptions, Loading, Trainer
from torsh_trainer.callbacks.base import StepReport
from torsh_trainer.errors import Interrupted
from torsh_trainer.testing.resuming import SentenceTask
from torsh_trainer.utils.signals import PATIENCE_S, Signals

HELD = '''
"""A run that is held up at chosen moments, and there tells that it is."""

import json, os, signal, sys, time
from pathlib import Path

from torsh_trainer import Callback
from torsh_trainer.tasks.models import SmallCNN

orders = Path("orders.json")
orders = json.loads(orders.read_text()) if orders.exists() else []
rank = os.environ.get("RANK")


class Held(Callback):
    def on_start(self, info):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)  # a byte for each signal, whatever the process is doing
        self.reading, self.came, self.number = reading, 0, 0
        Path(f"pid-{rank}").write_text(str(os.getpid()))
        sys.addaudithook(self.hook)
        Net.forward_hook = self.evaluates

    def hook(self, event, args):
        if event == "open" and not isinstance(args[0], int):
            path = Path(os.fsdecode(args[0]))
            if path.parent.name.startswith(".saving-"):
                step = path.parent.name.split("-")[2].lstrip("0")
                name = path.name.removeprefix(".").partition(".json.")[0]
                self.reached(f"{step}/{name}", f"*/{name}")

    def evaluates(self):
        self.reached(f"evaluation on {rank}")

    def reached(self, *places):
        if self.number == len(orders) or orders[self.number] not in places:
            return
        self.number += 1
        Path("half").touch()
        Path("half").rename(f"held-{self.number}")
        while self.came < self.number and not Path("go").exists():
            try:
                self.came += len(os.read(self.reading, 100))
            except BlockingIOError:
                time.sleep(0.01)


class Net(SmallCNN):
    forward_hook = None

    def forward(self, x):
        if not self.training and self.forward_hook:
            Net.forward_hook()
        return super().forward(x)
'''

STEPS = 16
COMMAND = [
    "+recipe=digits",
    "strategy=ddp",
    "launcher.num_processes=2",
    "trainer.device=cpu",
    "trainer.deterministic=true",
    "trainer.stages=[fit]",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every=1",
    "trainer.eval_every=5",
    "trainer.eval_every_epochs=null",
    "checkpoint.every_steps=4",
    "model=null",
    "+model={_target_: held.Net, image_size: 8}",
    "+callbacks.held={_target_: held.Held}",
    "callbacks.console.enabled=false",
    "logger.tensorboard.enabled=false",
    "hydra.run.dir=run",
]
CLOCKS = ("elapsed_s", "samples_per_s", "step_s", "data_wait_s", "wall_s")


class Place:
    """A folder in which a user starts runs; ``run`` is their run directory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        (folder / "held.py").write_text(HELD)
        self.started: list[subprocess.Popen[str]] = []

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, *overrides: str, held_at: Sequence[str] = ()) -> subprocess.Popen[str]:
        for left in [*self.folder.glob("held-*"), *self.folder.glob("pid-*")]:
            left.unlink()
        (self.folder / "orders.json").write_text(json.dumps(held_at))
        process = subprocess.Popen(
            [sys.executable, "-m", "torsh_trainer", *COMMAND, *overrides],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def ends(self, process: subprocess.Popen[str], *, code: int) -> str:
        """What it said to standard error, which is never a traceback."""
        out, error = process.communicate(timeout=480)
        assert process.returncode == code, out + error
        assert "Traceback" not in out + error
        return error

    def until_held(self, process: subprocess.Popen[str], number: int) -> None:
        deadline = time.monotonic() + 480
        while not (self.folder / f"held-{number}").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"not held for the time {number}"
            time.sleep(0.02)

    def workers(self) -> list[int]:
        return [int((self.folder / f"pid-{rank}").read_text()) for rank in range(2)]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.run.glob("checkpoints/step-*"))

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl, less what the clock says."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{key: row[key] for key in row if key not in CLOCKS} for row in rows]

    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "result.json").read_text()))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its workers notice, and follow
                process.communicate()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    places: list[Place] = []

    def make(name: str) -> Place:
        places.append(Place(tmp_path / name))
        return places[-1]

    yield make
    for one in places:
        one.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(2000)  # a run in many parts, beside other tests
def test_a_run_stopped_amid_saves_and_evaluations_goes_on_bit_for_bit(
    place: Any, warm_door: Any
) -> None:
    whole, parts = place("whole"), place("parts")
    undisturbed = warm_door(COMMAND, whole.folder, processes=2)
    assert undisturbed.returncode == 0, undisturbed.stderr

    # SIGTERM while rank 0 writes its tensors, and again, to everybody, before the manifest.
    stopped = parts.start(held_at=["4/__0_0.distcp", "4/manifest"])
    parts.until_held(stopped, 1)
    stopped.terminate()
    parts.until_held(stopped, 2)
    for pid in (stopped.pid, *parts.workers()):
        os.kill(pid, signal.SIGTERM)
    assert parts.ends(stopped, code=143) == (
        "error: stopped by SIGTERM after step 4; "
        "checkpoint.resume=auto in the same run directory goes on from here\n"
    )
    assert parts.checkpoints() == [4]
    assert parts.result()["error"]["type"] == "Interrupted"

    # SLURM's warning in the middle of an evaluation.
    stopped = parts.start("checkpoint.mode=async", held_at=["evaluation on 1"])
    parts.until_held(stopped, 1)
    stopped.send_signal(signal.SIGUSR1)
    assert "error: stopped by SIGUSR1 after step 5; " in parts.ends(stopped, code=138)
    assert parts.checkpoints() == [4, 5]

    # SLURM's warning while a thread of rank 1 writes; SIGTERM to everybody amid the next save.
    stopped = parts.start("checkpoint.mode=async", held_at=["8/__1_0.distcp", "*/__1_0.distcp"])
    parts.until_held(stopped, 1)
    stopped.send_signal(signal.SIGUSR1)
    parts.until_held(stopped, 2)
    for pid in (stopped.pid, *parts.workers()):
        os.kill(pid, signal.SIGTERM)
    error = parts.ends(stopped, code=143)
    step = parts.checkpoints()[-1]
    assert f"error: stopped by SIGUSR1 after step {step}; " in error
    assert parts.checkpoints() == sorted({4, 5, 8, min(step, 12), step})
    assert step < STEPS
    assert not list(parts.run.glob("checkpoints/.saving-*"))

    parts.ends(parts.start(), code=0)
    assert parts.rows() == whole.rows()
    assert parts.result()["metrics"] == whole.result()["metrics"]
    assert [row["step"] for row in parts.rows() if row["split"] == "train"] == [
        *range(1, STEPS + 1)
    ]


@pytest.mark.exhaustive
def test_a_second_run_in_the_folder_of_one_at_work_is_refused_and_the_first_does_not_notice(
    place: Any,
) -> None:
    home = place("home")
    first = home.start(held_at=["4/__0_0.distcp"])
    home.until_held(first, 1)
    holder = home.workers()[0]
    before = {path.name: path.read_bytes() for path in home.run.glob("config*")}

    same = home.start("optimizer.lr=1")
    told = home.ends(same, code=2)
    lock = f"{home.run}/checkpoints/.lock"
    words = f"another run saves into {home.run}/checkpoints: {lock} is held by process {holder} on "
    assert told.startswith(f"error: {words}")
    assert "stop it, or point checkpoint.dir (or hydra.run.dir) elsewhere" in told
    assert {path.name: path.read_bytes() for path in home.run.glob("config*")} == before

    other = home.start("hydra.run.dir=other", "checkpoint.dir=run/checkpoints")
    assert f"run/checkpoints/.lock is held by process {holder} on " in home.ends(other, code=2)
    assert not (home.folder / "other" / "metrics.jsonl").exists()

    (home.folder / "go").touch()
    home.ends(first, code=0)
    assert home.checkpoints() == [4, 8, 12, 16]
    assert home.result()["steps"] == STEPS
    assert "error" not in home.result()
    assert [row["step"] for row in home.rows() if row["split"] == "train"] == [*range(1, STEPS + 1)]
    assert not (home.run / "checkpoints" / ".lock").exists()


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_is_one_sentence_on_the_command_line(place: Any, disk: Any) -> None:
    home = place("home")
    path = disk(1 << 20).path  # one checkpoint, and not two
    error = home.ends(home.start(f"hydra.run.dir={path}/run"), code=1)
    (line,) = error.splitlines()
    assert line.startswith(
        f"error: cannot save the checkpoint {path}/run/checkpoints/step-00000008: "
    )
    assert "No space left on device (__" in line
    assert "MiB are free; free some space there, or choose another disk (checkpoint.dir)" in line
    assert [one.name for one in (path / "run" / "checkpoints").glob("*")] == ["step-00000004"]
    told = json.loads((path / "run" / "result.json").read_text())["error"]
    assert told["type"] == "ResourceError"


def test_a_signal_saves_where_only_ends_of_epochs_are_saved(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_step(self, report: StepReport) -> None:
            if report.step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    trainer = Trainer(
        task=SentenceTask(),
        loading=Loading(batch_size=2),
        max_steps=4,
        checkpoint=CheckpointOptions(every_epochs=1, at_end=False),
        callbacks=(Stop(),),
        run_dir=tmp_path / "run",
        device="cpu",
        log_level="error",
    )
    with pytest.raises(Interrupted, match=r"goes on from here") as caught:
        trainer.fit()
    assert caught.value.cause_exit_code == 128 + signal.SIGUSR1
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert names == ["step-00000002"]


def test_an_echo_of_ctrl_c_changes_nothing_and_a_second_one_ends_all() -> None:
    def twice(pause_s: float) -> int:
        with Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            time.sleep(pause_s)
            signal.raise_signal(signal.SIGINT)
            return signals.received

    assert twice(0.0) == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        twice(PATIENCE_S + 0.1)
