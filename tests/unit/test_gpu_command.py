"""``make gpu`` without a GPU: what it says, what it would install, how it keeps its time."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def gpu(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the command by their names."""
    monkeypatch.syspath_prepend(str(repository))
    names = ("prepare", "record", "__main__")
    found = {name: importlib.import_module(f"benchmarks.gpu.{name}") for name in names}
    return SimpleNamespace(**found, main=found["__main__"])


def driver(failed: int, count: int) -> Any:
    """A driver that answers so."""

    def tell(address: Any) -> int:
        address._obj.value = count
        return 0

    return SimpleNamespace(cuInit=lambda flags: failed, cuDeviceGetCount=tell)


def no_driver(name: str) -> Any:
    raise OSError(name)


# -- what is missing -------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_gets_one_line_and_exit_code_2(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.prepare.ctypes, "CDLL", no_driver)
    monkeypatch.setattr(gpu.main, "check_gpu", lambda: gpu.prepare.check_gpu(no_driver))
    assert gpu.main.main(["--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs an NVIDIA GPU" in line
    assert "make test" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("failed", "count"), [(100, 0), (0, 0)])
def test_a_driver_that_shows_no_gpu_is_said_with_what_hides_them(
    gpu: Any, failed: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(gpu.prepare.NotHere, match=r"CUDA_VISIBLE_DEVICES='7'.*nvidia-smi"):
        gpu.prepare.check_gpu(lambda name: driver(failed, count))
    gpu.prepare.check_gpu(lambda name: driver(0, 1))


def found(gpu: Any, torch: str, cuda: str | None, *, works: bool = True, missing: Any = ()) -> Any:
    return gpu.prepare.Found(torch, cuda, works, tuple(missing))


def test_offline_it_goes_on_with_what_is_there_or_says_what_is_not(gpu: Any) -> None:
    words = gpu.prepare.offline_words
    assert "older" not in words("python3", found(gpu, "2.13.0", "13.0"))
    assert "older than 2.13, so FSDP and" in words("python3", found(gpu, "2.11.0+cu130", "13.0"))
    for lacks, says in [
        (found(gpu, "2.13.0", "13.0", missing=["rich", "pytest"]), "has no rich, pytest"),
        (found(gpu, "2.13.0+cpu", None), "built without CUDA"),
        (found(gpu, "2.13.0", "13.0", works=False), "too old"),
    ]:
        with pytest.raises(gpu.prepare.NotHere, match=says):
            words("python3", lacks)


def test_a_near_torch_for_cuda_is_left_alone_and_any_other_is_not_used(
    gpu: Any, tmp_path: Path
) -> None:
    def plan(torch: str, cuda: str | None) -> list[list[str]]:
        return gpu.prepare.install_plan("python3", found(gpu, torch, cuda), tmp_path, tmp_path)

    for near in ("2.13.0+cu130", "2.14.1", "3.0.0"):
        assert "--system-site-packages" in plan(near, "13.0")[0], near
    for other, cuda in [("2.13.0+cpu", None), ("2.11.0", "13.0"), ("", None), ("nightly", "13")]:
        assert "--system-site-packages" not in plan(other, cuda)[0], other
    make_pins = plan("2.14.1+cu130", "13.0")[1]
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\ntriton==3.7\n")
    subprocess.run([sys.executable, *make_pins[1:]], check=True)
    assert (tmp_path / "constraints.txt").read_text() == "numpy==2.4.6\ntorch==2.14.1\n"


def test_this_python_is_seen_as_it_is(gpu: Any) -> None:
    import torch

    seen = gpu.prepare.look_at(sys.executable)
    assert (seen.torch, seen.cuda, seen.missing) == (torch.__version__, torch.version.cuda, ())
    assert gpu.prepare.OLDEST == (2, 13)


def test_the_oldest_torch_is_that_of_the_project(gpu: Any, project: dict[str, Any]) -> None:
    oldest = ".".join(map(str, gpu.prepare.OLDEST))
    assert f"torch>={oldest}" in project["dependencies"]


class Pip:
    """What stands for other programs: notes what is called, and fails where it is told."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[list[str]] = []
        self.fails = fails

    def run(self, command: list[str], **options: Any) -> Any:
        self.calls.append(command)
        return SimpleNamespace(returncode=int(self.fails and "pip" in command))


def test_it_installs_once_and_says_what_to_do_where_that_fails(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".venv-gpu").mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text(name)
    said: list[str] = []
    torch = found(gpu, "2.13.0", "13.0")
    monkeypatch.setattr(gpu.prepare, "look_at", lambda python: torch)
    failing, pip = Pip(fails=True), Pip()
    monkeypatch.setattr(gpu.prepare.subprocess, "run", failing.run)
    with pytest.raises(gpu.prepare.NotHere, match=r"without a network.*OFFLINE=1"):
        gpu.prepare.install("python3", tmp_path, said.append)
    monkeypatch.setattr(gpu.prepare.subprocess, "run", pip.run)
    for _ in range(2):
        inside = gpu.prepare.install("python3", tmp_path, said.append)
    assert inside == str(tmp_path / ".venv-gpu" / "bin" / "python")
    assert len(pip.calls) == 3, "the second call finds what the first has made"
    assert len(said) == 2
    (tmp_path / "constraints.txt").write_text("newer")
    gpu.prepare.install("python3", tmp_path, said.append)
    assert len(pip.calls) == 6
    monkeypatch.setattr(gpu.prepare, "look_at", lambda python: found(gpu, "2.13.0+cpu", None))
    with pytest.raises(gpu.prepare.NotHere, match=r"built without CUDA; remove \.venv-gpu"):
        gpu.prepare.install("python3", tmp_path, said.append)


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("not run", 0), ("failed", 1)])
def test_the_command_ends_with_1_where_a_part_failed(
    gpu: Any, outcome: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Done:
        def __init__(self, out: Path, *others: Any) -> None:
            (out / "gpu.md").write_text("a table")

        def run(self, parts: Any) -> Any:
            return {"parts": {part.name: {"outcome": outcome} for part in parts}}

    monkeypatch.setattr(gpu.main, "Course", Done)
    assert gpu.main.main(["--device", "cpu", "--out", str(tmp_path), "--only", "cost,idle"]) == code
    with pytest.raises(SystemExit):
        gpu.main.main(["--device", "cpu", "--only", "costs"])


# -- time ------------------------------------------------------------------------------------------


class Course:
    """The command's parts, as processes that a test writes."""

    def __init__(self, gpu: Any, out: Path, scripts: dict[str, str], monkeypatch: Any) -> None:
        self.scripts = scripts
        self.gpu = gpu
        self.out = out
        out.mkdir()
        monkeypatch.setattr(gpu.main, "ROOT", out)
        (out / "plugins").mkdir()
        for name, text in scripts.items():
            (out / f"part_{name}.py").write_text(
                "import json, pathlib, sys, time\n"
                "def write(found): pathlib.Path(sys.argv[-1]).write_text(json.dumps(found))\n"
                f"{text}\n"
            )

    def run(self, *parts: Any, budget_s: float = 300.0) -> dict[str, Any]:
        course = self.gpu.main.Course(self.out, "cpu", budget_s, sys.executable)
        process = course._process
        course._process = lambda part, words: process(part, [f"part_{words[1]}", *words[2:]])
        found: dict[str, Any] = course.run(list(parts))
        return found


FACTS = 'write({"found": {"versions": {"torch": "2.11.0"}}, "rows": [["device", "a", "b", "c"]]})'


def test_a_part_that_takes_too_long_or_fails_is_named_and_the_others_go_on(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = gpu.main.Part
    course = Course(
        gpu,
        tmp_path / "out",
        {
            "facts": FACTS,
            "cost": "time.sleep(600)",
            "idle": "sys.exit(3)",
            "saving": 'write({"found": 7, "rows": [["a save", "1 s", "2.0", "a | b"]]})',
        },
        monkeypatch,
    )
    found = course.run(
        part("cost", "slow", 1.0),
        part("idle", "fails", 60.0),
        part("accelerate", "a peer", 60.0, needs="accelerate"),
        part("sharded", "FSDP", 60.0),
        part("saving", "works", 60.0),
    )
    outcomes = {name: (told["outcome"], told["words"]) for name, told in found["parts"].items()}
    assert outcomes["cost"] == ("out of time", "stopped after 1 s")
    assert outcomes["idle"][0] == "failed"
    assert "exit code 3" in outcomes["idle"][1]
    assert outcomes["accelerate"] == ("not run", "accelerate is not installed")
    assert outcomes["sharded"] == ("not run", "FSDP needs torch 2.13")
    assert found["parts"]["saving"]["found"] == 7
    assert json.loads((tmp_path / "out" / "gpu.json").read_text()) == found
    table = (tmp_path / "out" / "gpu.md").read_text()
    for line in (
        "| device | a | b | c |",
        r"| a save | 1 s | 2.0 | a \| b |",
        "| cost | out of time |  | stopped after 1 s |",
        "| tests, throughput, lightning, contracts | not run |  | not asked for, or not yet |",
    ):
        assert line in table.splitlines()


def test_a_budget_that_is_spent_names_what_was_not_begun(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(gpu, tmp_path / "out", {"facts": FACTS}, monkeypatch)
    found = course.run(gpu.main.Part("cost", "later", 60.0), budget_s=5.0)
    told = found["parts"]["cost"]
    assert (told["outcome"], told["words"]) == ("not run", "the budget of 5 s is spent")


def test_all_parts_together_fit_into_ten_minutes(gpu: Any) -> None:
    assert gpu.main.BUDGET_S + gpu.main.LEAST_S < 600
    assert len({part.name for part in gpu.main.PARTS}) == len(gpu.main.PARTS)


def test_every_file_of_tests_of_a_gpu_is_in_one_part(gpu: Any, repository: Path) -> None:
    """``test_forms`` tests the others, and has none of a GPU."""
    named = [name for part in gpu.main.PARTS for name in part.tests]
    files = [path.stem.removeprefix("test_") for path in (repository / "tests/cuda").glob("t*.py")]
    assert sorted([*named, "forms"]) == sorted(files)


def test_the_peers_are_measured_before_the_many_tests_take_what_is_left(gpu: Any) -> None:
    names = [part.name for part in gpu.main.PARTS]
    assert names[:4] == ["tests", "throughput", "lightning", "accelerate"]
    assert names[-1] == "contracts"
    assert sum(part.limit_s for part in gpu.main.PARTS[:3]) < gpu.main.BUDGET_S


# -- which tests ran -------------------------------------------------------------------------------


def test_tests_are_recorded_one_by_one_and_those_not_reached_by_name(
    gpu: Any, tmp_path: Path, repository: Path
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "@pytest.mark.skip(reason='needs 2 GPUs')\n"
        "def test_skips(): pass\n"
        "def test_is_cut_off(): os._exit(9)\n"
        "def test_comes_after(): pass\n"
    )
    file = tmp_path / "record.jsonl"
    words = ["-p", "benchmarks.gpu.record", "--record", str(file), "-p", "no:cacheprovider"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_it.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(repository), "PATH": ""},
        capture_output=True,
    )
    found = gpu.record.read(file)
    assert found == {
        "passed": ["test_it.py::test_passes"],
        "failed": ["test_it.py::test_fails"],
        "skipped": {"needs 2 GPUs": ["test_it.py::test_skips"]},
        "not_run": ["test_it.py::test_is_cut_off", "test_it.py::test_comes_after"],
    }
    assert gpu.record.read(tmp_path / "none")["passed"] == []
