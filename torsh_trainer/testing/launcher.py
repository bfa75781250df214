"""The contract of a launcher as a test suite, with real processes that do without torch."""

from __future__ import annotations

import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, WorkerError
from torsh_trainer.launchers.base import LaunchContext, Launcher

_FOREVER_S = 3600.0
_PLACE = re.compile(
    r"(LOCAL_|NODE_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|(SLURM|OMPI|PMI|PMIX|PBS|LSB|HOROVOD|TORCHELASTIC)_.*"
)


class LauncherContract:
    """What every launcher must do; a plugin's test is one class that inherits this one.

    ``launcher`` starts ``processes`` processes. ``in_process`` says that it starts none: then an
    error comes through as it is. Folders that the suite makes must be visible to the processes.
    """

    launcher: ClassVar[Launcher]
    processes: ClassVar[int] = 2
    in_process: ClassVar[bool] = False

    def context(self, folder: Path) -> LaunchContext:
        """What the launcher is told of the outside world: no cluster, and a place for logs."""
        env = {name: value for name, value in os.environ.items() if not _PLACE.fullmatch(name)}
        return LaunchContext(env=env, log_dir=folder / "logs")

    @classmethod
    def pytest_generate_tests(cls, metafunc: Any) -> None:
        """pytest's hook: failures are tried on the first and on the last rank."""
        if "rank" in metafunc.fixturenames:
            metafunc.parametrize("rank", sorted({0, metafunc.cls.processes - 1}))

    # -- a job that ends well ---------------------------------------------------------------------

    def test_rank_0_answers_and_arguments_arrive(self) -> None:
        factor = 3  # closures travel as well

        def entry(world: World, number: int, text: str) -> dict[str, Any]:
            return {"rank": world.rank, "number": number * factor, "text": text}

        assert self._launch(entry, 14, "words") == {"rank": 0, "number": 42, "text": "words"}

    def test_every_process_has_its_own_place(self) -> None:
        def entry(world: World, folder: Path) -> None:
            place = (world.rank, world.size, world.local_rank, world.local_size, world.told)
            (folder / f"rank-{world.rank}").write_text(repr((os.getpid(), place)))

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self._launch(entry, folder)
            _wait_for(folder, "rank-*", self.processes)
            told = [eval(path.read_text(), {}) for path in sorted(folder.glob("rank-*"))]
        assert len({pid for pid, _ in told}) == self.processes
        for rank, (_, place) in enumerate(told):
            assert place[:2] == (rank, self.processes)
            assert 0 <= place[2] < place[3] <= self.processes
            assert place[4] == "process"

    def test_the_processes_meet(self) -> None:
        assert self._launch(_sum_of_ranks) == sum(range(1, self.processes + 1))

    # -- a job that fails -------------------------------------------------------------------------

    def test_an_error_names_its_rank_and_carries_the_traceback(self, rank: int) -> None:
        def entry(world: World) -> None:
            if world.rank == rank:
                raise ValueError("the label is 11")
            time.sleep(_FOREVER_S)

        error = self._error(entry)
        assert "the label is 11" in str(error)
        if not self.in_process:
            assert isinstance(error, WorkerError)
            assert error.facts["rank"] == rank
            assert "raise ValueError" in error.facts["traceback"]
            assert error.cause_exit_code == 3

    def test_the_users_mistake_in_a_worker_keeps_its_words_and_exit_code(self, rank: int) -> None:
        def entry(world: World) -> None:
            if world.rank == rank:
                raise ConfigError("data.batch_size=7 is odd", fix="make it even")
            time.sleep(_FOREVER_S)

        error = self._error(entry)
        assert "data.batch_size=7 is odd; make it even" in str(error)
        code = getattr(error, "cause_exit_code", getattr(error, "exit_code", None))
        assert code == 2
        assert str(pickle.loads(pickle.dumps(error))) == str(error), "the error does not travel"

    def test_a_killed_process_ends_the_job_and_no_other_outlives_it(self) -> None:
        if self.in_process:
            return
        victim = self.processes - 1

        def entry(world: World, folder: Path) -> None:
            (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
            _wait_for(folder, "pid-*", world.size)
            if world.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(_FOREVER_S)

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            error = self._error(entry, folder)
            pids = [int(path.read_text()) for path in folder.glob("pid-*")]
        assert isinstance(error, WorkerError)
        assert error.facts["rank"] == victim
        assert f"rank {victim}" in str(error)
        assert [pid for pid in pids if _alive(pid)] == [], "processes outlive their job"

    def test_a_process_that_just_leaves_is_a_failure_too(self) -> None:
        if self.in_process:
            return
        leaver = self.processes - 1

        def entry(world: World) -> None:
            if world.rank == leaver:
                os._exit(0)
            time.sleep(_FOREVER_S)

        error = self._error(entry)
        assert isinstance(error, WorkerError)
        assert error.facts["rank"] == leaver

    def test_a_launcher_is_a_frozen_value_that_travels(self) -> None:
        assert pickle.loads(cloudpickle.dumps(self.launcher)) == self.launcher
        assert hash(self.launcher) == hash(pickle.loads(cloudpickle.dumps(self.launcher)))

    # -- how it is done ---------------------------------------------------------------------------

    def _launch(self, entry: Callable[..., Any], *args: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return self.launcher.launch(entry, *args, context=self.context(Path(folder)))

    def _error(self, entry: Callable[..., Any], *args: Any) -> Exception:
        try:
            answer = self._launch(entry, *args)
        except Exception as error:  # noqa: BLE001 - which kind it is, the test looks at
            return error
        raise AssertionError(f"the job ended well, with {answer!r}")


def _sum_of_ranks(world: World) -> float:
    """Meets by torsh_trainer's own communicator: the World must hold all that it needs."""
    # Imported here: no other test of this suite pays for torch in its processes.
    import torch

    from torsh_trainer.comm import create
    from torsh_trainer.comm.base import CommOptions

    options = CommOptions(timeout_s=240.0, startup_timeout_s=240.0)
    comm = create(world, options, torch.device("cpu"), process_group=world.is_distributed)
    total = comm.reduce_values([world.rank + 1.0])[0]
    comm.close()
    return total


def _wait_for(folder: Path, pattern: str, count: int, *, patience_s: float = 240.0) -> None:
    end = time.monotonic() + patience_s
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < end, f"{folder} holds no {count} files {pattern}"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
