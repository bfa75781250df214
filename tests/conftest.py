"""What every test may rely on: a quiet environment, and the command line as a user types it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[1]

# Two test processes on two cores, each with ranks of its own: one thread a process.
# Set before torch is imported, and inherited by every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"

# A test run inside somebody's cluster job must not take that job's place for its own.
_CLUSTER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|(SLURM|OMPI|PMI|PMIX|MPI|PBS|LSB|LSF|JSM|HOROVOD|TORCHELASTIC|TORCHRUN)_.*"
    r"|JOB_COMPLETION_INDEX"
)
for _name in [name for name in os.environ if _CLUSTER.fullmatch(name)]:
    del os.environ[_name]

RunCommand = Callable[..., "subprocess.CompletedProcess[str]"]


def _run(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a command in ``cwd`` with ``env`` added, and take it down whole when it hangs.

    It stands in a session of its own, so that a timeout also ends the processes it has started.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end after {timeout_s} s: {command}\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def project(repository: Path) -> dict[str, Any]:
    """The ``project`` table of pyproject.toml."""
    return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="session")
def plugins(repository) -> list[dict[str, Any]]:
    """The [project] tables of the plugin distributions that live here."""
    files = sorted(repository.glob("plugins/*/pyproject.toml"))
    return [tomllib.loads(file.read_text())["project"] for file in files]


@pytest.fixture(scope="session")
def run_command() -> RunCommand:
    """``run_command(command, cwd=, env={}, timeout_s=120)``: any command, run to its end."""
    return _run


@pytest.fixture
def run_door(tmp_path: Path) -> RunCommand:
    """``run_door(args, cwd=tmp_path, env={}, timeout_s=120)``: the command line, run.

    Runs ``python -m torsh_trainer`` with the arguments in ``tmp_path`` (or ``cwd``), and returns
    the completed process with its exit code and both outputs as text.
    """

    def run(
        args: Sequence[str],
        cwd: Path | None = None,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torsh_trainer", *args]
        return _run(command, cwd=cwd or tmp_path, env=env, timeout_s=timeout_s)

    return run
