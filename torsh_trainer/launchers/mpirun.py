"""The launcher by mpirun: it starts an agent for each rank, which has its place and its rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from torsh_trainer.environments.mpi import ALLOCATIONS
from torsh_trainer.environments.reading import is_set
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.hosts.names import JobHost
from torsh_trainer.launchers import hardware
from torsh_trainer.launchers.base import LaunchContext, print_explanation
from torsh_trainer.launchers.loopback import confine
from torsh_trainer.launchers.mpirun_program import (
    find_implementation,
    find_mpirun,
    write_command,
)
from torsh_trainer.launchers.plan import JobRequest, LaunchPlan, PlannedFile
from torsh_trainer.launchers.remote.agreeing import agree
from torsh_trainer.launchers.remote.by_socket import Reception, SocketConnection, open_reception
from torsh_trainer.launchers.remote.calling import HOME, MODULE, TOKEN
from torsh_trainer.launchers.remote.connection import ask_all, close_all
from torsh_trainer.launchers.remote.exporting import find_exported
from torsh_trainer.launchers.remote.launcher import HostsLauncher

_END_S = 10.0
_SAID_BYTES = 4096


@dataclass(frozen=True)
class MpirunLauncher(HostsLauncher):
    """Starts processes by Open MPI's, MPICH's or Intel's mpirun, on this host or on others.

    Each is an MPI process from the start (``comm=mpi``, a library of the user's). Without ``hosts``
    or ``hostfile`` mpirun takes those of the scheduler in whose job it runs, else this one.
    ``num_processes`` auto is the sum of the slots, what the scheduler gave, or one per accelerator.
    ``processes_per_host`` is the same number on every host; None follows the slots. ``mpirun`` None
    is the one beside this Python, else on the PATH; ``mpirun_arguments`` come after ours.
    The rest is as ``HostsLauncher`` has it.
    """

    name = "mpirun"

    num_processes: int | Literal["auto"] = "auto"
    processes_per_host: int | None = None
    mpirun: str | None = None
    mpirun_arguments: tuple[str, ...] = ()
    bind_to: str = "none"

    def __post_init__(self) -> None:
        self.check_knobs(hosts_needed=False)
        if self.num_processes != "auto" and self.processes_per_host is not None:
            raise ConfigError(
                "launcher.num_processes and launcher.processes_per_host both say how many",
                fix="give one of them",
            )
        if self.processes_per_host is not None and not (self.hosts or self.hostfile):
            raise ConfigError(
                "launcher.processes_per_host counts on hosts, and none are named",
                fix="give launcher.num_processes, or launcher.hosts",
            )

    def launch(self, entry: Callable[..., Any], *args: Any, context: LaunchContext) -> Any:
        """See ``Launcher.launch``.

        Raises:
            ConfigError: hosts, versions, code or folders do not fit; each is named.
            ResourceError: there is no mpirun, or it does not start the processes.
        """
        hosts = self._find_hosts(context)
        with tempfile.TemporaryDirectory(prefix="torsh-mpirun-") as name:
            command = self._command(hosts, context, Path(name) / "hosts")
            exported = find_exported(self.export, context.env)
            alone = not hosts and not _is_allocated(context.env)
            with open_reception(alone=alone) as reception, contextlib.ExitStack() as stack:
                Path(name, "hosts").write_text(list_hosts(hosts))
                started = stack.enter_context(MpirunProcess(command, context.env, reception))
                agents = self._await_agents(reception, started)
                stack.callback(close_all, [agent for agent, _ in agents])
                if alone:  # by now mpirun listens, and nobody else's connections are wanted
                    confine(started.pid)
                return self._run(entry, args, agents, exported, context)

    def plan_launch(self, request: JobRequest, *, context: LaunchContext) -> LaunchPlan:
        """mpirun's command, and the file of hosts, whose folder is named when it starts."""
        hosts = self._find_hosts(context)
        file = Path(tempfile.gettempdir(), "torsh-mpirun", "hosts")
        command = tuple(self._command(hosts, context, file))
        files = (PlannedFile(file, list_hosts(hosts)),) if str(file) in command else ()
        return LaunchPlan(files, (command,))

    def size(self, context: LaunchContext) -> int:
        count = self._count(self._find_hosts(context), context)
        if count is None:
            raise ConfigError(
                "launcher.num_processes=auto leaves the number to mpirun and the scheduler",
                fix="give launcher.num_processes",
            )
        return count

    # -- before anything is started --------------------------------------------------------------

    def _find_hosts(self, context: LaunchContext) -> tuple[JobHost, ...]:
        hosts = self.read_named_hosts(context)
        if any("@" in host.name for host in hosts):
            raise ConfigError(
                "launcher=mpirun: mpirun takes no users before hosts",
                fix="write User into ~/.ssh/config",
            )
        per_host = self.processes_per_host
        return hosts if per_host is None else tuple(JobHost(h.name, per_host) for h in hosts)

    def _count(self, hosts: Sequence[JobHost], context: LaunchContext) -> int | None:
        """How many processes there will be; None where mpirun knows it."""
        if self.num_processes != "auto":
            room = sum(host.slots or 1 for host in hosts)
            if hosts and self.num_processes > room:
                raise ConfigError(
                    f"launcher.num_processes={self.num_processes}, and the hosts have {room} slots",
                    fix="give slots: launcher.hosts=[a:4,b:4], or lines HOST slots=4",
                )
            return self.num_processes
        if hosts:
            return sum(host.slots or 1 for host in hosts)
        return None if _is_allocated(context.env) else hardware.accelerators(context.env) or 1

    def _command(
        self, hosts: Sequence[JobHost], context: LaunchContext, hostfile: Path
    ) -> list[str]:
        program = find_mpirun(self.mpirun, context.env)
        names = [HOME, TOKEN, "PYTHONSAFEPATH"]
        if context.env.get("PYTHONPATH"):
            names.append("PYTHONPATH")
        words = write_command(
            program,
            find_implementation(program, context.env),
            count=self._count(hosts, context),
            hosts=hosts,
            hostfile=hostfile,
            per_host=self.processes_per_host,
            bind_to=self.bind_to,
            names=names,
        )
        return [*words, *self.mpirun_arguments, self.python or sys.executable, "-m", MODULE]

    # -- with the processes ----------------------------------------------------------------------

    def _await_agents(
        self, reception: Reception, started: MpirunProcess
    ) -> list[tuple[SocketConnection, World]]:
        """The agents and their places, in the order of their ranks."""
        until_s = time.monotonic() + self.startup_timeout_s
        places: dict[SocketConnection, World] = {}

        def is_complete(found: list[SocketConnection]) -> bool:
            for agent in found[len(places) :]:
                (told,) = ask_all([agent], "tell_place", [{}], timeout_s=self.startup_timeout_s)
                places[agent] = _read_place(agent, told)
            return bool(places) and len(places) == next(iter(places.values())).size

        found = reception.await_calls(
            is_complete, until_s=until_s, silence_s=self.silence_s, ended=started.explain_end
        )
        return _number_hosts([(one, places[one]) for one in found])

    def _run(
        self,
        entry: Callable[..., Any],
        args: Sequence[Any],
        agents: Sequence[tuple[SocketConnection, World]],
        exported: dict[str, str],
        context: LaunchContext,
    ) -> Any:
        leaders = {place.node_rank: agent for agent, place in reversed(agents)}
        first = [leaders[node] for node in sorted(leaders)]
        others = [agent for agent, _ in agents if agent not in first]
        agreed = agree(first, others, terms=self.terms, context=context)
        places = [(agent, _meet_at(place, agreed.meeting)) for agent, place in agents]
        if self.explain:
            meeting = agreed.meeting
            words = f"has {len(places)} processes on {len(first)} hosts started by mpirun; they "
            print_explanation(context, f"{words}meet at {meeting.address}:{meeting.port}")
        return self.run_job(entry, args, places, agreed=agreed, exported=exported, context=context)


def _is_allocated(env: Mapping[str, str]) -> bool:
    return any(is_set(env, name) for name in ALLOCATIONS)


def list_hosts(hosts: Sequence[JobHost]) -> str:
    """The file of hosts, as MPICH and Intel MPI read it."""
    return "".join(f"{host.name}:{host.slots or 1}\n" for host in hosts)


def _read_place(agent: SocketConnection, told: Mapping[str, Any]) -> World:
    if "refused" in told:
        raise ResourceError(
            f"{agent.host}: {told['refused']}",
            fix="is this mpirun of the same installation on every host?",
        )
    agent.host = str(told["host"])
    return World(**{name: value for name, value in told.items() if name != "host"})


def _number_hosts(
    agents: Sequence[tuple[SocketConnection, World]],
) -> list[tuple[SocketConnection, World]]:
    """The agents by rank, their hosts numbered: MPI's variables tell no numbers of hosts.

    Raises:
        ResourceError: two hosts have one name.
    """
    by_rank = sorted(agents, key=lambda pair: pair[1].rank)
    hosts = list(dict.fromkeys(agent.host for agent, _ in by_rank))
    seats = [(agent.host, place.local_rank) for agent, place in by_rank]
    twice = next((host for host, seat in seats if seats.count((host, seat)) > 1), None)
    if twice is not None:
        raise ResourceError(
            f"two hosts call themselves {twice}", fix="hostnamectl set-hostname, another for each"
        )
    return [
        (agent, replace(place, node_rank=hosts.index(agent.host), nodes=len(hosts)))
        for agent, place in by_rank
    ]


def _meet_at(place: World, meeting: Rendezvous) -> World:
    return replace(place, rendezvous=meeting if place.size > 1 else None)


class MpirunProcess:
    """mpirun at work, and what it says; it has ended with the block.

    By itself, once its processes have; else by force.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], reception: Reception
    ) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile(prefix="torsh-mpirun-")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                list(command),
                env={**env, **reception.variables, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            )
        except OSError as error:
            self._said.close()
            raise ResourceError(
                f"mpirun cannot be started: {error.strerror}", fix="name another: launcher.mpirun"
            ) from error

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def explain_end(self) -> ResourceError | None:
        """What it said before it ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._said.seek(0)
        lines = self._said.read()[-_SAID_BYTES:].decode(errors="replace").splitlines()
        told = [line.strip() for line in lines if line.strip("- \t")]
        killed = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ResourceError(
            f"mpirun ended: {' '.join(told[:8]) or killed}",
            fix="launcher.dry_run=true prints its command: try it by hand with hostname at its end",
        )

    def __enter__(self) -> MpirunProcess:
        return self

    def __exit__(self, *error: object) -> None:
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            try:
                self._process.wait(_END_S)
                break
            except subprocess.TimeoutExpired:
                continue
        self._said.close()
