"""docs/guarantees.md says what the tests say, and nothing is left out of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from torsh_trainer.testing.guarantees.__main__ import main
from torsh_trainer.testing.guarantees.page import page_of
from torsh_trainer.testing.guarantees.reading import NEEDED, Matrix, read
from torsh_trainer.testing.strategy import CAPABILITIES

PLUGIN = '''
"""An engine of somebody."""

from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.testing import StrategyContract
from torsh_trainer.testing.compare import FP32


class TestWarp(StrategyContract):
    strategy = DDP(bucket_cap_mb=3.0)
    world_sizes = (2,)
    refuses = {"fp16_mixed": "it knows bf16 alone"}
    tolerances = {"fp32": FP32._replace(relative=0.125)}
'''


@pytest.fixture(scope="module")
def matrix(repository: Path) -> Matrix:
    return read(repository)


def test_the_page_is_what_the_tests_say(repository: Path, run_command: Any) -> None:
    command = [sys.executable, "-m", "torsh_trainer.testing.guarantees", "--check"]
    done = run_command(command, cwd=repository)
    assert done.returncode == 0, done.stderr


def test_a_page_that_says_something_else_is_found_out(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "guarantees.md"
    page.write_text((repository / "docs" / "guarantees.md").read_text().replace("1, 2, 4", "1-4"))
    for folder in ("tests", "plugins"):
        (tmp_path / folder).symlink_to(repository / folder)
    monkeypatch.chdir(tmp_path)
    assert main(["--check"]) == 1
    assert "make guarantees writes it anew" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert "1, 2, 4" in page.read_text()


def test_every_capability_that_can_be_refused_has_a_rule_that_needs_it(matrix: Matrix) -> None:
    needed = {rule.needs for rule in matrix.properties["StrategyContract"]} - {""}
    assert needed == set(CAPABILITIES)
    assert set(NEEDED.values()) < needed


def test_every_rule_of_an_arithmetic_names_it(matrix: Matrix) -> None:
    for rule in matrix.properties["StrategyContract"]:
        if rule.arithmetic in NEEDED and "resumed" not in rule.name:
            assert rule.needs == NEEDED[rule.arithmetic], rule.name


def test_every_contract_has_somebody_who_keeps_it(matrix: Matrix) -> None:
    assert all(matrix.cases.values())
    assert matrix.moves, "the matrix of resumption was found"
    assert matrix.controls


def test_the_contracts_of_a_plugin_are_found_without_its_name(tmp_path: Path) -> None:
    file = tmp_path / "plugins" / "warp" / "tests" / "test_contract.py"
    file.parent.mkdir(parents=True)
    file.write_text(PLUGIN)
    (case,) = read(tmp_path).cases["StrategyContract"]
    assert (case.name, case.about, case.ranks) == ("TestWarp", "ddp(bucket_cap_mb=3.0)", (2,))
    page = page_of(read(tmp_path))
    assert "| fp16 mixed | `ddp` | it knows bf16 alone |" in page
    assert "1.2e-01" in page, "a bound of its own"
    assert "plugins/warp/tests/test_contract.py::TestWarp" in page
