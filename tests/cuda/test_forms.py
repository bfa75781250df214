"""No test of a GPU can only skip: each has a form that a machine without one runs.

The exceptions need two GPUs, and are named here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONTRACTS_ON_CPUS = {  # a class of test_contracts.py: where the same strategy keeps it on gloo
    "TestCommunicatorOnOne": "test_comm_contract.py::TestGloo",
    "TestCommunicatorOnTwo": "test_comm_contract.py::TestGloo",
    "TestSingleOnOne": "test_contract_single.py::TestSingle",
    "TestDDPOnOne": "test_contract_ddp.py::TestDDP",
    "TestDDPOnTwo": "test_contract_ddp.py::TestDDP",
    "TestFSDPOnOne": "test_contract_fsdp.py::TestFSDP",
    "TestFSDPOnTwo": "test_contract_fsdp.py::TestFSDPOfBlocks",
    "TestFSDPOffloadedOnTwo": "test_contract_fsdp.py::TestFSDPOnHostMemory",
    "TestNCCLOnOne": "test_contract_builtin.py::TestGloo",
    "TestNCCLOnTwo": "test_contract_builtin.py::TestGloo",
    "TestDPOnOne": "test_contract_single.py::TestSingle",  # one device: a DataParallel of nothing
}
ONLY_WITH_TWO = {"test_steps.py::test_dp_cuts_a_micro_batch_over_two_gpus"}
HERE = Path(__file__).parent


PRINT_MARKS = """
import sys
import pytest

class Printed:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        for item in session.items:
            marks = {mark.name for mark in item.iter_markers()} & {"gpu", "gpus"}
            print("test", item.nodeid.rpartition("/")[2], *sorted(marks), sep="\\t")

sys.exit(pytest.main(["-q", "--collect-only", sys.argv[1]], [Printed()]))
"""


@pytest.fixture(scope="module")
def marks() -> dict[str, set[str]]:
    """Tests of this folder that pytest collects, as ``file.py::name[params]``; their marks."""
    command = [sys.executable, "-c", PRINT_MARKS, str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    return {line[1]: set(line[2:]) for line in lines if line[0] == "test"}


@pytest.fixture
def gpu_tests(marks: dict[str, set[str]]) -> set[str]:
    return {test for test, found in marks.items() if "gpu" in found}


def function_of(test: str) -> str:
    return test.partition("[")[0]


def test_each_test_of_a_gpu_has_a_form_without_one(
    marks: dict[str, set[str]], gpu_tests: set[str]
) -> None:
    plain = {function_of(test) for test in marks.keys() - gpu_tests}
    assert gpu_tests
    contracts = {t for t in gpu_tests if t.startswith("test_contracts.py")}
    lacking = {function_of(test) for test in gpu_tests - contracts} - plain
    assert lacking == ONLY_WITH_TWO
    assert {test.split("::")[1] for test in contracts} == set(CONTRACTS_ON_CPUS)


def test_the_forms_of_the_contracts_exist(repository: Path) -> None:
    for where in set(CONTRACTS_ON_CPUS.values()):
        file, name = where.split("::")
        text = (repository / "tests" / "distributed" / file).read_text(encoding="utf-8")
        assert re.search(rf"^class {name}\(\w+Contract\)", text, re.MULTILINE), where


def test_what_needs_two_gpus_is_marked_so(marks: dict[str, set[str]], gpu_tests: set[str]) -> None:
    two = {t for t in gpu_tests if "cuda-2" in t or "OnTwo" in t or function_of(t) in ONLY_WITH_TWO}
    assert two
    assert {test for test, found in marks.items() if "gpus" in found} == two


@pytest.mark.parametrize(
    ("devices", "count", "words"),
    [
        (0, 1, "torch sees no CUDA device here"),
        (0, 2, "torch sees no CUDA device here"),
        (1, 1, ""),
        (1, 2, "needs 2 GPUs, and there is 1"),
        (2, 2, ""),
    ],
)
def test_one_reason_says_why_a_test_is_not_run(
    devices: int, count: int, words: str, monkeypatch: pytest.MonkeyPatch, lacks: Any
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    assert lacks(count) == words
