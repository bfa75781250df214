"""What the tests of the door share: the door in this process, and a small recipe."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

QUICK = """\
# A recipe that trains in a second.
defaults:
  - override /task: classification
  - override /model: mlp
  - override /data: digits
  - override /launcher: inline

trainer:
  max_steps: 2
  eval_every_epochs: null
  eval_every: 2

data:
  batch_size: 32

callbacks:
  console: {enabled: false}

logger:
  tensorboard: {enabled: false}

log_level: warning
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: empty but for ``quick.yaml``, a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").write_text(QUICK)
    return tmp_path


class BackgroundDoor:
    """The command line in a process of its own, which is still at work."""

    def __init__(self, args: Sequence[str], home: Path) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torsh_trainer", *args],
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def wait_for(self, pattern: str, *, timeout_s: float = 360) -> None:
        """Returns once a file that matches ``pattern`` is there, and not empty."""
        end = time.monotonic() + timeout_s
        while not any(path.stat().st_size for path in self.home.glob(pattern)):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, f"no {pattern} after {timeout_s} s"
            time.sleep(0.05)

    def interrupted(self, number: int) -> tuple[str, str]:
        """Both outputs, after it was sent a signal."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=240)


@pytest.fixture
def background_door(home: Path) -> Iterator[Callable[..., BackgroundDoor]]:
    """``background_door("+recipe=quick.yaml", ...)``: started, and ended with the test."""
    doors: list[BackgroundDoor] = []

    def start(*args: str) -> BackgroundDoor:
        doors.append(BackgroundDoor(args, home))
        return doors[-1]

    yield start
    for door in doors:
        door.process.kill()
        door.process.communicate()
