"""This host as the checks of the doctor see it: variables, files, commands, and the job to come."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from torsh_trainer import environments
from torsh_trainer.environments.reading import LOOPBACK, USUAL_PORT, is_set
from torsh_trainer.environments.world import World
from torsh_trainer.errors import TorshError
from torsh_trainer.hosts.interfaces import list_interfaces

_COMMAND_TIMEOUT_S = 20.0
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES", "PBS_NUM_NODES")
_PROCESSES = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")

ResultT = TypeVar("ResultT")


class CommandAnswer(NamedTuple):
    """What a command printed; ``code`` is None where there is no such command, or no end to it."""

    code: int | None
    out: str = ""
    err: str = ""


RunCommand = Callable[[Sequence[str]], CommandAnswer]


def run_command(argv: Sequence[str], *, timeout_s: float = _COMMAND_TIMEOUT_S) -> CommandAnswer:
    """Runs a command of the host, without a shell."""
    try:
        done = subprocess.run(
            list(argv),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return CommandAnswer(None, err=f"{argv[0]} gave no answer within {timeout_s:g} s")
    except OSError as error:
        return CommandAnswer(None, err=f"{argv[0]}: {error.strerror}")
    return CommandAnswer(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Machine:
    """One host, and what a job will ask of it.

    ``nodes`` and ``processes`` (of the job on this host) are 0 where nobody says: then the
    variables of a scheduler or launcher decide. ``folder`` is where runs and checkpoints go.
    ``root`` is where ``/proc`` and ``/sys`` are read from: tests give recorded ones.
    """

    env: Mapping[str, str]
    folder: Path = Path("runs")
    nodes: int = 0
    processes: int = 0
    port: int = 0
    root: Path = Path("/")
    run: RunCommand = field(default=run_command, repr=False)

    def ask(self, argv: Sequence[str]) -> CommandAnswer:
        """What a command of the host prints; each is run once."""
        key = tuple(argv)
        if key not in self._answers:
            self._answers[key] = self.run(argv)
        return self._answers[key]

    def read(self, path: str) -> str | None:
        """The text of a file of the host such as ``/proc/meminfo``; None where it has none."""
        try:
            return (self.root / path.lstrip("/")).read_text("utf-8", errors="replace")
        except OSError:
            return None

    def read_number(self, path: str) -> int | None:
        """The whole number that a file holds; None where it holds none (``max``)."""
        text = (self.read(path) or "").strip()
        return int(text) if text.lstrip("-").isdigit() else None

    def glob(self, pattern: str) -> list[Path]:
        """Files and folders of the host, sorted; ``pattern`` without the first slash."""
        return sorted(self.root.glob(pattern))

    @cached_property
    def job_nodes(self) -> int:
        """Hosts of the job: as the user says, else by the variables, else 1."""
        if self.nodes:
            return self.nodes
        world = self._world
        if world is not None and world.nodes > 1:
            return world.nodes
        said = self._number(_NODES)
        if said is not None:
            return max(1, said)
        address = self.env.get("MASTER_ADDR", "").strip()
        if address and address not in (*LOOPBACK, socket.gethostname()) and not self.is_master:
            return 2
        return 1

    @cached_property
    def job_processes(self) -> int:
        """Processes of the job on this host; 1 where nobody says."""
        if self.processes:
            return self.processes
        world = self._world
        if world is not None and world.size > 1:
            return world.local_size
        return self._number(_PROCESSES) or 1

    @cached_property
    def job_port(self) -> int:
        """Where the job meets: as the user says, else MASTER_PORT, else torch's usual port."""
        said = self._number(("MASTER_PORT",))
        return self.port or (said if said and said < 65536 else USUAL_PORT)

    @property
    def node_rank(self) -> int | None:
        """The number of this host in the job by its variables; None where nothing says it."""
        world = self._world
        if world is not None and world.nodes > 1:
            return world.node_rank
        return self._number(("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"))

    @property
    def is_master(self) -> bool:
        """MASTER_ADDR is an address of this host, or nothing names another."""
        address = self.env.get("MASTER_ADDR", "").strip()
        if not address or address in LOOPBACK or address == socket.gethostname():
            return True
        return bool(find_addresses(address) & own_addresses())

    @property
    def serves_store(self) -> bool:
        """This process is who would listen at the job's port: rank 0, where no other does already.

        torchrun's agent serves the store itself, before it starts the processes.
        """
        world = self._world
        if world is None or world.size == 1:
            return self.is_master and not self.node_rank
        return world.is_rank_zero and not (world.rendezvous and world.rendezvous.hosted)

    @property
    def cores(self) -> float:
        """Cores that this process may use: its affinity, and the quota of its cgroups."""
        quota = self.cpu_quota
        return min(len(os.sched_getaffinity(0)), math.inf if quota is None else quota)

    @property
    def cpu_quota(self) -> float | None:
        """Cores that the cgroups of this process grant, old and new; None where they grant all."""
        found = []
        for folder in self.cgroups("cpu"):
            quota, _, period = (self.read(f"{folder}/cpu.max") or "max").partition(" ")
            if quota.isdigit():
                found.append(int(quota) / int(period or 100_000))
            old = self.read_number(f"{folder}/cpu.cfs_quota_us")
            if old is not None and old > 0:
                found.append(old / (self.read_number(f"{folder}/cpu.cfs_period_us") or 100_000))
        return min(found, default=None)

    @property
    def memory_limit(self) -> int | None:
        """Bytes that the cgroups of this process grant; None where they grant all."""
        names = ("memory.max", "memory.limit_in_bytes")
        found = [
            self.read_number(f"{at}/{name}") for at in self.cgroups("memory") for name in names
        ]
        limits = [limit for limit in found if limit is not None and limit < 2**60]
        return min(limits, default=None)

    def cgroups(self, controller: str) -> list[str]:
        """The folders of this process's cgroup and all above it, of both versions."""
        folders = []
        for line in (self.read("/proc/self/cgroup") or "").splitlines():
            _, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            for mount in _cgroup_mounts(names.split(","), controller):
                parts = [part for part in path.split("/") if part and part != ".."]
                folders += [
                    "/".join([mount, *parts[:count]]) for count in range(len(parts), -1, -1)
                ]
        return folders

    @cached_property
    def memory(self) -> dict[str, int]:
        """``/proc/meminfo`` in bytes (counts of pages as they stand)."""
        found = {}
        for line in (self.read("/proc/meminfo") or "").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
        return found

    @cached_property
    def _answers(self) -> dict[tuple[str, ...], CommandAnswer]:
        return {}

    @cached_property
    def _world(self) -> World | None:
        try:
            return environments.detect(self.env)
        except TorshError:  # the check `environment` says what is wrong
            return None

    def _number(self, names: Sequence[str]) -> int | None:
        for name in names:
            text = self.env.get(name, "").strip()
            if is_set(self.env, name) and text.isascii() and text.isdigit():
                return int(text)
        return None


def _cgroup_mounts(names: Sequence[str], controller: str) -> list[str]:
    if names == [""]:
        return ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
    return [f"/sys/fs/cgroup/{controller}"] if controller in names else []


def find_addresses(name: str) -> set[str]:
    """The addresses that a host name has; empty where it has none."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return set()


def own_addresses() -> set[str]:
    """The addresses of this host's interfaces, and those of the loopback."""
    return {found.address for found in list_interfaces() if found.address} | set(LOOPBACK)


def wait_for(work: Callable[[], ResultT], *, timeout_s: float) -> ResultT | None:
    """The answer of ``work``, or None once it takes longer: it is left alone then, in a thread."""
    answers: list[ResultT] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None
