"""docs/migrate/deepspeed.md: the file that it takes across, trained beside the real engine."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from torsh_trainer import __main__ as door

PAGE = Path(__file__).parents[3] / "docs" / "migrate" / "deepspeed.md"


def without_numbers(lines: list[str]) -> list[str]:
    """A mark for each number and step, and single spaces: roundings differ by machine."""
    marked = [re.sub(r"(step )?\d+(\.\d+)?(e[-+]\d+)?|-$", "#", line) for line in lines]
    return [" ".join(line.split()) for line in marked]


@pytest.mark.exhaustive
def test_the_proof_of_the_page_agrees_as_it_shows(tmp_path, monkeypatch, capfd):
    page = PAGE.read_text()
    (config,) = re.findall(r'^```json title="ds_config.json"\n(.*?)^```$', page, re.M | re.S)
    (command,) = re.findall(r"^python -m torsh_trainer (verify .*)$", page, re.M)
    (shown,) = re.findall(r'^```text title="verify"\n(.*?)^```$', page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(config)
    code = door.main(shlex.split(command))
    said = capfd.readouterr()
    assert code == 0, said.err
    lines = said.out.splitlines()
    first, *table = shown.splitlines()
    begins = lines.index(first)  # it agrees, in these words
    told = lines[begins + 1 : begins + 1 + len(table)]
    assert without_numbers(told) == without_numbers(table)
    assert table[1] == told[1]  # in bf16 the losses are the same to the last bit
    (rung,) = json.loads(Path("proof/verify.json").read_text())["rungs"]
    assert rung["strategies"][1]["status"] == "agrees"
    assert Path("proof/verify.html").exists()
