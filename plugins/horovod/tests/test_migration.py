"""docs/migrate/horovod.md, done as it says: its files written, its commands run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "migrate" / "horovod.md"
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\| `(.+?)` \| (\S+) \| (\S+) \| `(.*)` \|$", re.MULTILINE)
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 500.0


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> list[tuple[int, str]]:
    """(exit code, what was printed) of every command of the page, in its order."""
    folder = tmp_path_factory.mktemp("job")
    page = PAGE.read_text()
    for name, text in FILE.findall(page):
        (folder / name).write_text(text)
    found = []
    env = {**os.environ, "COLUMNS": "400"}
    for line in "".join(COMMANDS.findall(page)).splitlines():
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
    return found


def test_every_command_of_the_page_does_what_it_says(outputs):
    (translated, _), (trained, run), (verified, proof) = outputs
    assert translated == 10
    assert trained == 0, run
    assert verified == 0, proof


def test_its_table_is_the_reports(outputs):
    _, report = outputs[0]
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


def test_its_proof_is_what_verify_prints(outputs):
    (shown,) = SHOWN.findall(PAGE.read_text())
    assert shown.strip() in outputs[2][1]
