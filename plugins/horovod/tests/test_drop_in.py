"""Scripts run by drop-in do what they do under the real Horovod: call by call, and in training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from torsh_trainer.dropin.names import PUBLIC
from torsh_trainer.testing.compare import FP32

pytestmark = pytest.mark.usefixtures("warm_interpreters")

SCRIPTS = Path(__file__).with_name("scripts")
EVERYTHING = SCRIPTS / "everything.py"
IDIOMS = SCRIPTS / "idioms.py"

SAME = (
    "mnist",
    "passes",
    "half",
    "grouped",
    "predivided",
    "sliced",
    "by_hand",
    "sparse",
    "uneven",
    "unused",
    "resumed",
    "elastic",
    "benchmark",
)
"""Idioms of which the installed engine, which has gloo alone, can do every part."""


REFUSED = re.compile(r"gloo::IoException|Gloo connect|timed out", re.IGNORECASE)
"""The gloo that comes with Horovod now and then fails to connect two processes of one machine (one
start in ten, seen on a busy one, by real interpreters as by warm ones): both wait, or both dial."""


def run(script: Path, *words: str, real: bool, processes: int = 2) -> Path:
    """Runs it under either engine; the place at which it leaves its files."""
    out = Path(mkdtemp(prefix="dropin-test-")) / "out"
    given = [str(script), str(out), *words]
    if real:
        patient = ["--gloo-timeout-seconds", "120"]  # a busy machine starts slowly
        line = ["horovodrun", "-np", str(processes), "--gloo", *patient, sys.executable, *given]
    else:
        line = [sys.executable, "-m", "torsh_trainer", "drop-in", "-np", str(processes), *given]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for _ in range(3 if real else 1):
        done = subprocess.run(
            line,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode == 0 or not REFUSED.search(done.stdout + done.stderr):
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def read(out: Path, name: str = "", ranks: int = 2) -> list[dict[str, Any]]:
    middle = f".{name}" if name else ""
    return [json.loads(Path(f"{out}{middle}.{rank}").read_text()) for rank in range(ranks)]


@cache
def everything(real: bool) -> Path:
    """Where the table and all idioms have left what they found."""
    return run(EVERYTHING, *SAME, "wrong_op", real=real)


NO_ADASUM = re.compile("Adasum")
"""The installed engine has gloo alone, and no Adasum: see ``test_adasum_is_its_formula``."""


def without_order(row: Any) -> Any:
    """An error without which of two ranks it names first, and without Python's own words."""
    if not isinstance(row, dict) or "error" not in row:
        return row
    if row["error"] == "AttributeError":
        return "AttributeError"
    return row["error"], sorted(re.findall(r"\w+|\[[^]]*\]|\([^)]*\)", row["says"]))


def test_every_call_gives_what_horovods_gives_and_every_error_is_its_own():
    theirs, ours = read(everything(True)), read(everything(False))
    for real, mine in zip(theirs, ours, strict=True):
        assert real.keys() == mine.keys()
        assert len(real) > 200
        different = {
            name: (real[name], mine[name])
            for name in real
            if not NO_ADASUM.match(name) and without_order(real[name]) != without_order(mine[name])
        }
        assert different == {}


def test_adasum_is_its_formula():
    ours = read(everything(False))
    a, b = (
        torch.arange(6).reshape(2, 3).double() * (rank + 1) / 3 + (3 * rank + 1) / 3
        for rank in range(2)
    )
    dot = (a * b).sum()
    expected = a * (1 - dot / (2 * (a * a).sum())) + b * (1 - dot / (2 * (b * b).sum()))
    for mine in ours:
        for name, bound in (("Adasum", 1e-6), ("Adasum float64", 1e-6), ("Adasum half", 1e-3)):
            assert torch.allclose(torch.tensor(mine[name][2]).double(), expected, rtol=bound)


def same(real: dict[str, Any], mine: dict[str, Any], bound: float) -> None:
    assert len(real["losses"]) == len(mine["losses"]) > 1
    for step, (theirs, ours) in enumerate(zip(real["losses"], mine["losses"], strict=True)):
        assert ours == pytest.approx(theirs, rel=bound, abs=bound), f"loss of step {step}"
    assert real["state"].keys() == mine["state"].keys()
    for name, values in real["state"].items():
        theirs, ours = torch.tensor(values), torch.tensor(mine["state"][name])
        assert torch.allclose(ours, theirs, rtol=bound, atol=bound), name


@pytest.mark.parametrize("name", SAME)
def test_an_idiom_trains_as_under_horovod(name):
    theirs = read(everything(True), name)
    ours = read(everything(False), name)
    for real, mine in zip(theirs, ours, strict=True):
        same(real, mine, FP32.parameters)


def test_and_a_wrong_reduction_would_show():
    theirs = read(everything(True), "mnist")
    ours = read(everything(False), "wrong_op")
    with pytest.raises(AssertionError, match="loss of step"):
        same(theirs[0], ours[0], FP32.parameters)
    same(read(everything(True), "wrong_op")[0], ours[0], FP32.parameters)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mnist", "grouped", "by_hand", "sliced", "uneven"])
def test_so_it_does_on_three_processes(name):
    names = ("mnist", "grouped", "by_hand", "sliced", "uneven")
    theirs = read(_three(True, names), name, ranks=3)
    ours = read(_three(False, names), name, ranks=3)
    for real, mine in zip(theirs, ours, strict=True):
        same(real, mine, 1e-4)


@cache
def _three(real: bool, names: tuple[str, ...]) -> Path:
    return run(IDIOMS, *names, real=real, processes=3)


def test_every_name_of_horovods_module_is_there():
    import horovod.torch as real

    names = {name for name in dir(real) if not name.startswith("_")}
    assert names - set(PUBLIC["torch"]) - {"check_extension", "mpi_lib_v2"} == set()
