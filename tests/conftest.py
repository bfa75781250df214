"""What every test may rely on: a quiet environment, and the command line as a user types it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from torsh_trainer.__main__ import main
from torsh_trainer.environments.world import World

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
# The tests start hundreds of interpreters; each would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A test run inside somebody's cluster job must not take that job's place for its own.
_CLUSTER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|(SLURM|OMPI|PMI|PMIX|MPI|PBS|LSB|LSF|JSM|HOROVOD|TORCHELASTIC|TORCHRUN)_.*"
    r"|JOB_COMPLETION_INDEX"
)
for _name in [name for name in os.environ if _CLUSTER.fullmatch(name)]:
    del os.environ[_name]

# A shell without job control starts what it puts into the background with Ctrl-C ignored, and every
# process of a test would inherit it: a test that sends one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

RunCommand = Callable[..., "subprocess.CompletedProcess[str]"]


def _run(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 480,
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
    """``run_command(command, cwd=, env={}, timeout_s=480)``: any command, run to its end."""
    return _run


@pytest.fixture
def run_door(tmp_path: Path) -> RunCommand:
    """``run_door(args, cwd=tmp_path, env={}, timeout_s=480)``: the command line, run.

    Runs ``python -m torsh_trainer`` with the arguments in ``tmp_path`` (or ``cwd``), and returns
    the completed process with its exit code and both outputs as text.
    """

    def run(
        args: Sequence[str],
        cwd: Path | None = None,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 480,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torsh_trainer", *args]
        return _run(command, cwd=cwd or tmp_path, env=env, timeout_s=timeout_s)

    return run


# -- the command line without the price of an interpreter -----------------------------------------


def _as_torchrun_would(world: World, port: int, folder: Path, python: str) -> None:
    """Gives this rank the place and the variables that torchrun would have started it with.

    What it starts by ``sys.executable`` is started by ``python``.
    """
    # Imported late: what needs no torch is tested without it.
    from torsh_trainer.testing.ranks import torchrun_variables

    sys.executable = python
    os.chdir(folder)
    if world.size > 1:
        os.environ.update(torchrun_variables(world, port))


def _command(
    world: World, port: int, folder: Path, python: str, args: Sequence[str]
) -> tuple[int, str, str]:
    _as_torchrun_would(world, port, folder, python)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    return code, out.getvalue(), err.getvalue()


def _script(world: World, port: int, folder: Path, python: str, name: str) -> None:
    _as_torchrun_would(world, port, folder, python)
    runpy.run_path(name, run_name="__main__")


@pytest.fixture(scope="module")
def warm_command() -> Iterator[RunCommand]:
    """``warm_command(args, processes=1, cwd=, timeout_s=480)``: the command line on warm ranks.

    For tests of what a run trains: an interpreter that has to import everything costs many times
    what their few steps do. The ranks are forked, live as long as the module's tests, and are
    found by the command line as those that torchrun started. So the launcher has no part in it,
    nor has a fresh process; what is about these takes ``run_door``.
    """
    # Imported late: what needs no torch is tested without it.
    from torch.distributed import TCPStore

    from torsh_trainer.testing.ranks import RankPool

    with contextlib.ExitStack() as stack:

        @cache
        def ranks(processes: int) -> RankPool:
            return stack.enter_context(RankPool(processes, join=False))

        def run(
            args: Sequence[str], *, processes: int = 1, cwd: Path, timeout_s: float = 480
        ) -> subprocess.CompletedProcess[str]:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            answers = ranks(processes).run(
                _command, store.port, cwd, sys.executable, list(args), timeout_s=timeout_s
            )
            codes, outs, errs = zip(*answers, strict=True)
            return subprocess.CompletedProcess(args, max(codes), "".join(outs), "".join(errs))

        yield run


@pytest.fixture
def warm_door(warm_command: RunCommand, tmp_path: Path) -> RunCommand:
    """``warm_door(args, cwd=tmp_path, processes=1, timeout_s=480)``: as ``warm_command``."""

    def run(
        args: Sequence[str], cwd: Path | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return warm_command(args, cwd=cwd or tmp_path, **options)

    return run


@pytest.fixture
def warm_script() -> Callable[..., None]:
    """``warm_script("script.py", processes=2, cwd=)``: what torchrun does with a script, warm."""
    from torch.distributed import TCPStore

    from torsh_trainer.testing.ranks import RankPool

    def run(name: str, *, processes: int, cwd: Path) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with RankPool(processes, join=False) as ranks:
            ranks.run(_script, store.port, cwd, sys.executable, name)

    return run
