"""docs/migrate/horovod.md, done as it says: its files written, its commands run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from torsh_trainer_horovod import runtime

from torsh_trainer.comm.base import Communicator
from torsh_trainer.testing.ranks import shared_pool

pytestmark = pytest.mark.exhaustive  # each command of a page, with what it prints

PAGE = Path(__file__).parents[3] / "docs" / "migrate" / "horovod.md"
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\| `(.+?)` \| (\S+) \| (\S+) \| `(.*)` \|$", re.MULTILINE)
LOSSES = re.compile(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 500.0
APART = 2e-3
"""Relative: gradients of other samples are rounded to fp16."""


class Done(NamedTuple):
    """What following the page came to; ``outputs`` are exit codes and what was printed."""

    folder: Path
    said: str  # by the script, under Horovod
    outputs: list[tuple[int, str]]


def under_horovod(comm: Communicator, folder: Path, arguments: list[str]) -> str:
    """The page's script, as its launch line starts it; what it prints."""
    said, before = io.StringIO(), (Path.cwd(), sys.argv)
    try:
        os.chdir(folder)
        sys.argv = ["train.py", *arguments]
        with runtime.start(comm, {}), contextlib.redirect_stdout(said):
            runpy.run_path("train.py", run_name="__main__")
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
    return said.getvalue()


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Done:
    """The files of the page written, its script run, and after that every command in its order."""
    folder = tmp_path_factory.mktemp("job")
    page = PAGE.read_text()
    for name, text in FILE.findall(page):
        (folder / name).write_text(text)
    words = shlex.split((folder / "run.sh").read_text())
    arguments = words[words.index("train.py") + 1 :]
    said, *_ = shared_pool(2).run(under_horovod, folder, arguments, timeout_s=LIMIT_S)
    found = []
    env = {**os.environ, "COLUMNS": "400"}
    lines = "".join(COMMANDS.findall(page)).replace("\\\n", " ")
    for line in lines.splitlines():
        program, *words = shlex.split(line)
        assert (program, *words[:2]) == ("python", "-m", "torsh_trainer")
        ran = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        found.append((ran.returncode, ran.stdout + ran.stderr))
    return Done(folder, said, found)


def test_every_command_of_the_page_does_what_it_says(done):
    (translated, _), *others = done.outputs
    assert translated == 10
    assert len(others) == 4
    for code, text in others:
        assert code == 0, text


def test_its_table_is_the_reports(done):
    _, report = done.outputs[0]
    rows = TABLE.findall(PAGE.read_text())
    assert len(rows) > 8
    lines = report.splitlines()
    for key, line, verdict, becomes in rows:
        at = next(i for i, text in enumerate(lines) if text.startswith(f"{key} "[:40]))
        cells = lines[at].split()
        assert line in cells, key
        assert verdict in cells, key
        following = " ".join(lines[at : at + 3])
        assert all(setting in following for setting in becomes.split()), key


def test_its_proof_is_what_verify_prints(done):
    (shown,) = SHOWN.findall(PAGE.read_text())
    assert shown.strip() in done.outputs[2][1]


def test_the_losses_go_on_where_the_scripts_checkpoint_was_saved(done):
    theirs = {int(e): float(loss) for e, loss in re.findall(r"epoch (\d): loss (\S+)", done.said)}
    rows = [
        json.loads(line)
        for file in done.folder.glob("runs/**/metrics.jsonl")
        for line in file.read_text().splitlines()
    ]
    mine = {row["step"] // 28: row["loss"] for row in rows if row["step"] in (112, 140)}
    shown = {int(epoch): (float(a), float(b)) for epoch, a, b in LOSSES.findall(PAGE.read_text())}
    assert mine.keys() == shown.keys() == {4, 5}
    for epoch, loss in mine.items():
        assert loss == pytest.approx(theirs[epoch], rel=APART)
        assert shown[epoch] == pytest.approx((theirs[epoch], loss), rel=10 * APART)
        assert theirs[epoch - 1] > (1 + 20 * APART) * theirs[epoch]  # another epoch is not it
