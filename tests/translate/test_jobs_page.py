"""The page that takes a whole project across: its files, what its commands print, and the run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_trainer.__main__ import main

pytestmark = pytest.mark.usefixtures("warm_interpreters")

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def test_every_command_of_the_page_works_and_prints_what_stands_below_it(
    repository, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "124")
    typed, compared, trained = "", 0, 0
    page = (repository / "docs" / "migrate" / "jobs.md").read_text()
    for language, title, text in FENCE.findall(page):
        if title.startswith("digits-job/"):
            Path(title).parent.mkdir(exist_ok=True)
            Path(title).write_text(text)
        elif title == "output":
            assert main(shlex.split(typed)[3:]) == 0
            assert capsys.readouterr().out.strip("\n") == text.strip("\n"), typed
            compared += 1
        elif title == "digits_task.py":
            assert main(shlex.split(typed)[3:]) == 0
            assert "start it with: PYTHONPATH=digits-job python" in capsys.readouterr().out
            assert text in Path(title).read_text()
            compared += 1
        elif language == "console":
            typed = text
            if typed.startswith("PYTHONPATH="):
                train(typed)
                trained += 1
    assert (compared, trained) == (3, 1)


def train(typed: str) -> None:
    """The run, on two processes; its accuracy is that of a network that has learned."""
    assign, python, *words = shlex.split(typed)
    assert python == "python"
    paths = [assign.partition("=")[2], os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [accuracy] = re.findall(r"eval accuracy +([\d.]+)", done.stdout)
    assert float(accuracy) > 0.9
