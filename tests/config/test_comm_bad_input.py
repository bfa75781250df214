"""Backends that are not here, asked for in every way: what to install is told in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm_interpreters")

RECIPE = """\
# A recipe that names its launcher.
defaults:
  - override /task: classification
  - override /model: mlp
  - override /data: digits
  - override /launcher: mpi
"""
DOOR = """\
import contextlib, io, json, sys
from torsh_trainer.__main__ import main
answers = []
for line in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as words:
        code = main(line.split())
    answers.append([code, words.getvalue()])
print(json.dumps(answers))
"""
WITHOUT = {
    "+recipe=digits launcher=inline strategy=mpi": (1, "rank 0 cannot use mpi"),
    "+recipe=digits launcher=inline strategy=ddp comm=mpi": (1, "rank 0 cannot use mpi"),
    "+recipe=digits launcher=inline strategy=ddp comm.backend=mpi": (1, "rank 0 cannot use mpi"),
    "+recipe=digits launcher=mpi": (2, "unknown launcher 'mpi'"),
    "+recipe=named.yaml": (2, "unknown launcher 'mpi'"),
    "+recipe=digits strategy=deepspeed": (2, "unknown strategy 'deepspeed'"),
    "+recipe=digits strategy=horovod": (2, "unknown strategy 'horovod'"),
}


@pytest.fixture(scope="module")
def without_plugins(
    tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> dict[str, tuple[int, str]]:
    """What the door answers where only the core is installed: line -> exit code and words.

    All that is installed here is there as well, as links, but for plugins: -S has Python look
    nowhere else. One process answers all lines, for what it imports takes longer than they do.
    """
    home, installed = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("site-packages")
    (home / "named.yaml").write_text(RECIPE)
    for place in [Path(place) for place in sys.path if place.endswith("-packages")]:
        for entry in place.iterdir():
            link = installed / entry.name
            if not entry.name.startswith(("torsh_mpi", "torsh_trainer_")) and not link.exists():
                link.symlink_to(entry)
    done = subprocess.run(
        [sys.executable, "-S", "-c", DOOR, *WITHOUT],
        cwd=home,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(repository), str(installed)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return {line: (code, words) for line, (code, words) in zip(WITHOUT, answers, strict=True)}


@pytest.mark.parametrize("line", WITHOUT)
def test_without_its_plugin_the_error_says_what_to_install(without_plugins, line):
    code, words = without_plugins[line]
    assert code == WITHOUT[line][0]
    assert WITHOUT[line][1] in words
    plugin = next((name for name in ("deepspeed", "horovod") if name in line), "mpi")
    assert f"; pip install torsh-trainer-{plugin}" in words
    assert len(words.splitlines()) == 1


def test_what_two_processes_need_is_installed_with_the_core(project):
    """Without numpy, which torch does not ask for, its collectives of objects fail."""
    assert any(line.startswith("numpy") for line in project["dependencies"])


def test_a_backend_that_this_machine_cannot_use_offers_a_way_out(door):
    answer = door("+recipe=quick.yaml", "strategy=nccl", "trainer.device=cpu")
    assert answer.code == 1
    assert "rank 0 cannot use nccl" in answer.err
    assert "set comm.on_missing=fallback to take gloo" in answer.err
    assert "another strategy than strategy=nccl" in answer.err
    assert len(answer.err.splitlines()) == 1
