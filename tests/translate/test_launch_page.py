"""What stands on the page about launch files is what its commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from torsh_trainer.__main__ import main

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def test_every_command_of_the_page_prints_what_stands_below_it(
    repository, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "124")
    typed, compared = "", 0
    for language, title, text in FENCE.findall(
        (repository / "docs" / "migrate" / "launch.md").read_text()
    ):
        if title == "run.sh":
            Path(title).write_text(text)
        elif language == "console":
            typed = text
        elif title == "output":
            argv = shlex.split(typed)[3:]
            assert main(argv) in (0, 10, 13)
            assert capsys.readouterr().out.strip("\n") == text.strip("\n"), typed
            compared += 1
    assert compared == 3
