"""Starting the other processes of a script from its first, anew for every job of a Hydra sweep.

Lightning's launcher starts the script again, with the words of its command line. In a sweep these
say all jobs, and what the first job leaves in the environment tells the next one that its processes
run already. Here the others are started for one job alone, and let go when the next one begins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.launchers import (
    _SubprocessScriptLauncher as _FabricLauncher,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import (
    _SubprocessScriptLauncher as _TrainerLauncher,
)

from torsh_trainer.comm import start
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError

log = logging.getLogger(__name__)

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
"""What a started process is told, and what Lightning leaves in the first one's environment."""

PATIENCE_S = 60.0
"""How long the processes of a job may go on when the first one has gone on to the next job."""

_GRACE_S = 5.0
"""How long the first process has to see for itself that another one has failed."""

_FOR_SWEEPS = ("hydra.mode", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper")


def sweep_job() -> Any:
    """Hydra's own configuration in a job of a sweep; None elsewhere."""
    if "hydra" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig  # whose application this is
    from hydra.types import RunMode

    found = HydraConfig.get() if HydraConfig.initialized() else None
    return found if found is not None and found.mode is RunMode.MULTIRUN else None


def command(job: Any, rank: int) -> list[str]:
    """What starts the script once more as process ``rank`` of this job, and of no other.

    Raises:
        ConfigError: the job runs in a process that does not know how the script was started.
    """
    from hydra._internal.utils import get_args_parser

    import __main__  # what was started

    launcher = job.runtime.choices["hydra/launcher"]
    if launcher != "basic":
        raise ConfigError(
            f"hydra/launcher={launcher} runs this job in a process of its own, from which the "
            "script cannot be started again for the other processes",
            fix="leave hydra/launcher=basic, or have srun, mpirun or torchrun start the processes",
        )
    if __main__.__spec__ is None:
        started = [str(Path(job.runtime.cwd, sys.argv[0]))]
    else:
        started = ["-m", __main__.__spec__.name]
    typed = get_args_parser().parse_args(sys.argv[1:])
    flags = {
        "--config-path": typed.config_path,
        "--config-name": typed.config_name,
        "--config-dir": typed.config_dir,
    }
    given = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    of_hydra = [
        text for text in job.overrides.hydra if not text.lstrip("+~").startswith(_FOR_SWEEPS)
    ]
    own = {
        "hydra.mode": "RUN",
        "hydra.run.dir": _quote(job.runtime.output_dir),
        "hydra.output_subdir": "null",  # one process alone keeps the composition
        "hydra.job.name": _quote(f"{job.job.name}_rank_{rank}"),  # and has a log of that name
        "hydra.job.num": job.job.num,
        "hydra.job.id": _quote(job.job.id),
    }
    settings = [f"{key}={value}" for key, value in own.items()]
    return [sys.executable, *started, *given, *job.overrides.task, *of_hydra, *settings]


def _quote(value: Any) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


# -- one job after another -------------------------------------------------------------------------


@dataclass
class _Job:
    """What this process has of a job of a sweep whose other processes it has started."""

    folder: str
    before: dict[str, str | None]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def leave(self) -> None:
        """Waits for the others, and puts the environment back."""
        self.left.set()
        for process in self.processes:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        start.forget(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def watch(self) -> None:
        """Ends this process where another has failed, which it would wait for in vain."""
        while not self.left.wait(1.0):
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                return
            if any(codes) and not self.left.wait(_GRACE_S):
                rank = next(rank for rank, code in enumerate(codes, start=1) if code)
                log.error(
                    "rank %d of the job in %s ended with exit code %d; the others end too",
                    rank,
                    self.folder,
                    codes[rank - 1],
                )
                self.kill(signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)  # SIGTERM waits for the collective to end

    def kill(self, signum: int) -> None:
        """Sends a signal to the others."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)


_current: _Job | None = None
_met: list[Communicator] = []


def has_met(comm: Communicator) -> None:
    """Notes a communicator that ends with the job, at the latest."""
    _met.append(comm)


def leave_last_job() -> None:
    """Ends what the last job of a sweep has left in this process, where another one has begun."""
    global _current  # noqa: PLW0603 - one process, one job at a time
    job = sweep_job()
    if _current is None or (job is not None and job.runtime.output_dir == _current.folder):
        return
    while _met:
        _met.pop().close()
    _current.leave()
    _current = None


class _ByJob:
    """A launcher that starts the other processes for the job of a sweep that this one is in."""

    cluster_environment: Any
    num_processes: int
    num_nodes: int
    procs: list[Any]

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Calls ``function`` once there are all processes."""
        job = sweep_job()
        if job is None or self.cluster_environment.creates_processes_externally:
            given = {} if trainer is None else {"trainer": trainer}
            return super().launch(function, *args, **given, **kwargs)  # type: ignore[misc]
        if self.num_nodes > 1:
            raise ConfigError(
                f"num_nodes={self.num_nodes} in a sweep of Hydra's, which starts processes on its "
                "own host alone",
                fix="have each job started by srun, mpirun or torchrun on all hosts",
            )
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        self._start(job)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException:
            self.kill(signal.SIGKILL)
            raise

    def kill(self, signum: Any) -> None:
        """Sends a signal to the others; the first process knows of the failure then."""
        if _current is not None:
            _current.left.set()
            _current.kill(signum)
        else:
            super().kill(signum)  # type: ignore[misc]

    def _start(self, job: Any) -> None:
        global _current  # noqa: PLW0603 - see leave_last_job
        commands: Sequence[list[str]] = [
            command(job, rank) for rank in range(1, self.num_processes)
        ]
        told = {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
            "NODE_RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.num_processes),
        }
        assert tuple(told) == VARIABLES
        _current = _Job(job.runtime.output_dir, {name: os.environ.get(name) for name in VARIABLES})
        os.environ.update(told)
        for rank, words in enumerate(commands, start=1):
            env = {**os.environ, "LOCAL_RANK": str(rank)}
            _current.processes.append(subprocess.Popen(words, env=env, cwd=job.runtime.cwd))
        self.procs = list(_current.processes)
        threading.Thread(target=_current.watch, name="job-of-a-sweep", daemon=True).start()


class TrainerLauncher(_ByJob, _TrainerLauncher):
    """Lightning's launcher of its Trainer, at home in sweeps."""


class FabricLauncher(_ByJob, _FabricLauncher):
    """Lightning's launcher of Fabric, at home in sweeps."""
