"""What ``make gpu`` needs: a GPU, and a Python with torch for it. Standard library only."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OLDEST = (2, 13)
"""The oldest torch on which the whole suite has run; see pyproject.toml."""
OFFLINE_LEAST = ("torch", "numpy", "rich", "cloudpickle", "yaml", "fsspec", "pytest")
"""Modules without which nothing can be run; Hydra is not among them: no test here needs it."""
ALSO = ("pytest_timeout",)
"""What pytest's configuration names."""
VENV = Path(".venv-gpu")
NEEDED = ("pytest>=8.3", "pytest-timeout>=2.3", "accelerate>=1.10", "lightning>=2.6,<2.7")


class NotHere(Exception):
    """What is missing here, in a sentence, and the next move."""


@dataclass(frozen=True)
class Found:
    """What a Python says of its torch; ``torch`` is empty where it has none."""

    torch: str
    cuda: str | None
    works: bool
    missing: tuple[str, ...]

    @property
    def near(self) -> bool:
        """Whether its torch is for CUDA, and one that this project supports."""
        return self.cuda is not None and release_of(self.torch) >= OLDEST


def release_of(version: str) -> tuple[int, ...]:
    """2.13.0+cu130 as (2, 13); () for what is no version."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


# -- the machine -----------------------------------------------------------------------------------


def check_gpu(load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Asks the driver for GPUs, before anything is fetched.

    Raises:
        NotHere: there is no driver, or it shows none.
    """
    elsewhere = "make test runs each of its tests in a form for CPUs"
    try:
        driver = load("libcuda.so.1")
    except OSError:
        raise NotHere(
            f"make gpu needs an NVIDIA GPU, and this machine has no driver for one; {elsewhere}"
        ) from None
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if failed or not count.value:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        raise NotHere(
            f"make gpu needs an NVIDIA GPU, and the driver shows none{shown} "
            f"(CUDA error {failed}): see nvidia-smi; {elsewhere}"
        )


_ASK = """
import importlib.util, json, sys
names = sys.argv[1:]
found = {"missing": [n for n in names if importlib.util.find_spec(n) is None]}
try:
    import torch
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda,
              "works": torch.cuda.is_available()}
except ImportError:
    found |= {"torch": "", "cuda": None, "works": False}
print(json.dumps(found))
"""


def look_at(python: str) -> Found:
    """What that Python has."""
    command = [python, "-W", "ignore", "-c", _ASK, *OFFLINE_LEAST, *ALSO]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Found(found["torch"], found["cuda"], found["works"], tuple(found["missing"]))


# -- a Python for it -------------------------------------------------------------------------------


def offline_words(python: str, found: Found) -> str:
    """What is said of a run with what is installed.

    Raises:
        NotHere: that is not enough.
    """
    if found.missing:
        raise NotHere(
            f"OFFLINE=1, and {python} has no {', '.join(found.missing)}; "
            "name a Python that has them (make gpu OFFLINE=1 PYTHON=python3), or leave OFFLINE out"
        )
    _check_torch(python, found, "name another with PYTHON=")
    words = f"using {python} as it is, with torch {found.torch}"
    if release_of(found.torch) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        words += (
            f": older than {oldest}, so FSDP and torch.distributed's newer names are left out, "
            "and a failure may be its age"
        )
    return words


def install_plan(python: str, found: Found, root: Path, venv: Path) -> list[list[str]]:
    """The commands that make ``venv``.

    Where ``python`` has a near torch for CUDA, the venv sees it, and pip leaves it alone; else pip
    takes the version of constraints.txt.
    """
    inside = str(venv / "bin" / "python")
    pins = str(root / "constraints.txt")
    if found.near:
        own = venv / "constraints.txt"
        return [
            [python, "-m", "venv", "--system-site-packages", str(venv)],
            [python, "-c", _PINS, pins, str(own), found.torch.split("+")[0]],
            [inside, "-m", "pip", "install", "-q", "-c", str(own), "-e", str(root), *NEEDED],
        ]
    return [
        [python, "-m", "venv", str(venv)],
        [inside, "-m", "pip", "install", "-q", "-c", pins, "-e", str(root), *NEEDED],
    ]


_PINS = """
import pathlib, sys
lines = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
kept = [line for line in lines if not line.startswith(("torch==", "triton=="))]
text = "\\n".join([*kept, "torch==" + sys.argv[3], ""])
pathlib.Path(sys.argv[2]).write_text(text, encoding="utf-8")
"""


def install(python: str, root: Path, say: Callable[[str], None]) -> str:
    """A Python of its own for the tests, made once; a later call finds it.

    Raises:
        NotHere: pip failed, or what it brought knows no GPU.
    """
    venv = root / VENV
    inside = str(venv / "bin" / "python")
    done = venv / ".installed"
    wanted = "\n".join((root / name).read_text() for name in ("pyproject.toml", "constraints.txt"))
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        found = look_at(python)
        its = f"the torch {found.torch} of {python}" if found.near else "torch of constraints.txt"
        say(f"installing into {venv}, with {its}; this is not in the budget")
        for command in install_plan(python, found, root, venv):
            if subprocess.run(command, check=False).returncode:
                raise NotHere(
                    f"`{' '.join(command[:4])} ...` failed, see above; without a network go on "
                    "with what is installed: make gpu OFFLINE=1 PYTHON=python3"
                )
        done.write_text(wanted, encoding="utf-8")
    _check_torch(inside, look_at(inside), f"remove {VENV} and name one that works with PYTHON=")
    return inside


def _check_torch(python: str, found: Found, fix: str) -> None:
    if found.cuda is None:
        raise NotHere(f"torch {found.torch} of {python} was built without CUDA; {fix}")
    if not found.works:
        raise NotHere(
            f"torch {found.torch} of {python} is for CUDA {found.cuda} and reaches no GPU: the "
            f"driver may be too old for it (nvidia-smi says which CUDA it knows); {fix}"
        )


def own_python() -> str:
    """This one."""
    return sys.executable
