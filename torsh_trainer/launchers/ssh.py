"""The launcher over machines: an agent on each by ssh, which starts the processes there."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.hosts.names import JobHost
from torsh_trainer.hosts.ssh import SshWords
from torsh_trainer.launchers.base import LaunchContext, print_explanation
from torsh_trainer.launchers.plan import JobRequest, LaunchPlan
from torsh_trainer.launchers.remote.agreeing import HostAgreement, agree
from torsh_trainer.launchers.remote.by_ssh import AgentCommand, connect_all
from torsh_trainer.launchers.remote.connection import AgentConnection, close_all
from torsh_trainer.launchers.remote.exporting import find_exported
from torsh_trainer.launchers.remote.knobs import check_ssh_option
from torsh_trainer.launchers.remote.launcher import HostsLauncher

_OPTIONS = ("ControlPath=none", "RemoteCommand=none", "ClearAllForwardings=yes")
_FURTHER = ("-T", "-x", *(word for option in _OPTIONS for word in ("-o", option)))
"""A connection of our own, which ends when its client does, and nothing of a login but a pipe."""

_THROUGH_ONE_SERVER = 8

_USER = re.compile(r"[A-Za-z0-9_][\w.-]*\$?", re.ASCII)
_JUMP = re.compile(r"(?:[\w.-]+@)?[A-Za-z0-9_][\w.:-]*(?:,(?:[\w.-]+@)?[A-Za-z0-9_][\w.:-]*)*")


@dataclass(frozen=True)
class Ssh(HostsLauncher):
    """Starts processes on hosts by an agent on each, which OpenSSH's client reaches.

    ``processes_per_host`` auto takes the slots, else one per accelerator of the host, else one.
    ``user``, ``ssh_port``, ``identity_file``, ``jump_host``, ``ssh_config`` and ``ssh_options``
    (``Name=value`` of ``ssh_config``) are for OpenSSH's client, which checks keys of hosts as the
    user's configuration says. The rest is as ``HostsLauncher`` has it.
    """

    name = "ssh"

    processes_per_host: int | Literal["auto"] = "auto"
    user: str | None = None
    ssh_port: int | None = None
    identity_file: Path | None = None
    jump_host: str | None = None
    ssh_config: Path | None = None
    ssh_options: tuple[str, ...] = ()
    shared_folder: bool = True

    def __post_init__(self) -> None:
        self.check_knobs(hosts_needed=True)
        for option in self.ssh_options:
            check_ssh_option(option)
        for name, value, form in (("user", self.user, _USER), ("jump_host", self.jump_host, _JUMP)):
            if value is not None and form.fullmatch(value) is None:
                raise ConfigError(
                    f"launcher.{name}={value!r} is no name that ssh is given",
                    fix="write letters, digits, '.', '_' and '-', as in ~/.ssh/config",
                )
        for name, path in (("identity_file", self.identity_file), ("ssh_config", self.ssh_config)):
            if path is not None and not path.expanduser().is_file():
                raise ConfigError(
                    f"launcher.{name}={path}: there is no such file", fix="correct the path"
                )
        if not self.shared_folder:
            raise ConfigError(
                "launcher.shared_folder=false cannot be honoured: code, configuration and results "
                "are not carried to hosts and back",
                fix="put the run on a file system that all hosts mount (hydra.run.dir), and leave "
                "launcher.shared_folder=true",
            )

    def launch(self, entry: Callable[..., Any], *args: Any, context: LaunchContext) -> Any:
        """See ``Launcher.launch``.

        Raises:
            ConfigError: hosts, versions, code or folders do not fit; each is named.
            ResourceError: a host is not reached, or lost.
        """
        hosts = self.read_named_hosts(context)
        command = self._command(context)
        if shutil.which("ssh") is None:
            raise ResourceError(
                "launcher=ssh needs ssh, which is not here", fix="apt install openssh-client"
            )
        exported = find_exported(self.export, context.env)
        with self._connect([host.name for host in hosts], command) as connections:
            placed = self._meet(hosts, connections, context)
            if self.explain:
                print_explanation(context, _plan_words(placed.worlds, hosts))
            places = [(connections[world.node_rank], world) for world in placed.worlds]
            return self.run_job(
                entry, args, places, agreed=placed.agreed, exported=exported, context=context
            )

    def plan_launch(self, request: JobRequest, *, context: LaunchContext) -> LaunchPlan:
        """ssh's command for each host; which processes there are the agents are told later."""
        command = self._command(context)
        return LaunchPlan(
            commands=tuple(tuple(command.argv(h.name)) for h in self.read_named_hosts(context))
        )

    def size(self, context: LaunchContext) -> int:
        hosts = self.read_named_hosts(context)
        counts = [self._count(host) for host in hosts]
        if None in counts:
            raise ConfigError(
                "launcher.processes_per_host=auto is known once the hosts are asked for their "
                "accelerators",
                fix="give launcher.processes_per_host, or slots: launcher.hosts=[a:2,b:2]",
            )
        return sum(count for count in counts if count is not None)

    # -- before anything is started --------------------------------------------------------------

    def _count(self, host: JobHost) -> int | None:
        return host.slots if self.processes_per_host == "auto" else self.processes_per_host

    def _command(self, context: LaunchContext) -> AgentCommand:
        words: list[str] = []
        if self.ssh_config is not None:
            words += ["-F", str(self.ssh_config.expanduser())]
        if self.user is not None:
            words += ["-l", self.user]
        if self.ssh_port is not None:
            words += ["-p", str(self.ssh_port)]
        if self.identity_file is not None:
            words += ["-i", str(self.identity_file.expanduser()), "-o", "IdentitiesOnly=yes"]
        if self.jump_host is not None:
            words += ["-J", self.jump_host]
        for option in self.ssh_options:
            words += ["-o", option]
        env = {"PYTHONSAFEPATH": "1"}
        if context.env.get("PYTHONPATH"):
            env["PYTHONPATH"] = context.env["PYTHONPATH"]
        alive_s = max(1, round(self.silence_s / 3))
        ssh = SshWords(tuple(words), further=_FURTHER, alive_s=alive_s)
        return AgentCommand(ssh, self.python or sys.executable, env)

    # -- with the hosts --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connect(
        self, names: Sequence[str], command: AgentCommand
    ) -> Iterator[list[AgentConnection]]:
        at_once = None if self.jump_host is None else _THROUGH_ONE_SERVER
        connections = connect_all(names, command, silence_s=self.silence_s, at_once=at_once)
        try:
            yield connections
        finally:
            close_all(connections)

    def _meet(
        self,
        hosts: Sequence[JobHost],
        connections: Sequence[AgentConnection],
        context: LaunchContext,
    ) -> PlacedJob:
        """Checks what the hosts have in common, and gives every process its place."""
        agreed = agree(connections, (), terms=self.terms, context=context)
        counts = self._ask_counts(hosts, connections)
        return PlacedJob(place_ranks(counts, agreed.meeting, source=self.name), agreed)

    def _ask_counts(
        self, hosts: Sequence[JobHost], connections: Sequence[AgentConnection]
    ) -> list[int]:
        counts = [self._count(host) for host in hosts]
        for node, count in enumerate(counts):
            if count is None:
                answer = connections[node].ask(
                    "count_accelerators", timeout_s=self.startup_timeout_s
                )
                counts[node] = max(1, int(answer["count"]))
        return [count for count in counts if count is not None]


@dataclass(frozen=True)
class PlacedJob:
    """The places of all processes, and what their hosts have agreed on."""

    worlds: tuple[World, ...]
    agreed: HostAgreement


def place_ranks(counts: Sequence[int], meeting: Rendezvous, *, source: str) -> tuple[World, ...]:
    """The places of processes of which each host has so many, one host after the other."""
    size = sum(counts)
    return tuple(
        World(
            rank=sum(counts[:node]) + local_rank,
            size=size,
            local_rank=local_rank,
            local_size=count,
            node_rank=node,
            nodes=len(counts),
            rendezvous=meeting,
            source=source,
        )
        for node, count in enumerate(counts)
        for local_rank in range(count)
    )


def _plan_words(worlds: Sequence[World], hosts: Sequence[JobHost]) -> str:
    meeting = worlds[0].rendezvous
    assert meeting is not None, "processes to start have a meeting"
    places = ", ".join(
        f"{sum(world.node_rank == node for world in worlds)} on {host.name}"
        for node, host in enumerate(hosts)
    )
    return f"starts {places}; they meet at {meeting.address}:{meeting.port}"
