"""docs/gpu.md says of ``make gpu`` what the command does, and names tests that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its head."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_every_finding_is_settled_by_tests_that_exist(page: str, repository: Path) -> None:
    rows = rows_of(page, "What was found")
    assert [row[0] for row in rows] == [*map(str, range(1, 19)), "plugins"]
    for number, _, now, held in rows:
        assert re.match(r"mended|refused|refuted", now), f"{number}: {now}"
        files = re.findall(r"`([\w/]+\.py)`", held)
        assert files, f"{number}: {held}"
        for file in files:
            assert (repository / file).is_file(), f"{number}: {file}"


def test_tests_that_the_page_names_elsewhere_exist(page: str, repository: Path) -> None:
    named = set(re.findall(r"`((?:tests|plugins)/[\w/]+\.(?:py|json))`", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (repository / name).is_file()] == []


def test_the_parts_of_the_command_are_those_of_the_page(
    page: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository))
    command: Any = importlib.import_module("benchmarks.gpu.__main__")
    told: dict[str, float] = {}
    for names, _, limit in rows_of(page, "make gpu"):
        for name in re.findall(r"`(\w+)`", names):
            told[name] = float(limit.split()[0])
    assert told == {part.name: part.limit_s for part in command.PARTS}
    assert f"have {command.BUDGET_S:g} s" in page
