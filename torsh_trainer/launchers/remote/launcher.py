"""What launchers over several hosts share: their knobs, and a job over agents that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.hosts.names import JobHost, read_hostfile, read_hosts
from torsh_trainer.launchers import job
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.launchers.remote.agreeing import HostAgreement, Terms
from torsh_trainer.launchers.remote.connection import AgentConnection
from torsh_trainer.launchers.remote.exporting import check_names
from torsh_trainer.launchers.remote.knobs import check_job_knobs
from torsh_trainer.launchers.remote.transport import AgentSeat, Shown, transport_over


@dataclass(frozen=True)
class HostsLauncher(Launcher):
    """Starts processes on ``hosts`` (``a``, ``b:2`` with its slots), or on those of ``hostfile``.

    ``python`` None is this Python's path, ``folder`` None the current directory: where ranks work,
    while code and runs stand at the paths that they have here. ``export`` names variables of this
    process that the others get, by the connection and never in a command line. ``address`` None is
    an address of the first host that the others reach; ``port`` None takes a free one.
    ``silence_s`` is after how long without a word a host counts as lost. ``output`` all shows what
    every rank prints, with its name before each line. ``dry_run`` prints what would be run, and
    runs nothing.
    """

    hosts: tuple[str, ...] = ()
    hostfile: Path | None = None
    python: str | None = None
    folder: str | None = None
    export: tuple[str, ...] = ("NCCL_*", "GLOO_*", "TORCH_*", "OMP_*")
    threads_per_process: int | Literal["auto"] = "auto"
    address: str | None = None
    port: int | None = None
    startup_timeout_s: float = 120.0
    grace_s: float = 25.0
    silence_s: float = 12.0
    output: Shown = "rank_zero"
    dry_run: bool = False
    explain: bool = False

    def check_knobs(self, *, hosts_needed: bool) -> None:
        """Refuses what no launcher over hosts can honour.

        Raises:
            ConfigError: names the knob.
        """
        check_job_knobs(self, hosts_needed=hosts_needed)
        check_names(self.export)

    def read_named_hosts(self, context: LaunchContext) -> tuple[JobHost, ...]:
        """The hosts that the knobs name; none where they name none.

        Raises:
            ConfigError: they cannot be read, or processes have been started already.
        """
        found = context.found
        if found is not None and (found.size > 1 or found.elastic):
            raise ConfigError(
                f"launcher={self.name} starts the processes itself, and {found.source} has already "
                f"started this one as one of {found.size}",
                fix="start this command once, outside of it; or leave launcher=local",
            )
        if self.hostfile is not None:
            return read_hostfile(self.hostfile.expanduser(), option="launcher.hostfile")
        return read_hosts(self.hosts, option="launcher.hosts") if self.hosts else ()

    @property
    def terms(self) -> Terms:
        """What hosts are asked to agree on."""
        return Terms(self.folder, self.address, self.port, self.startup_timeout_s, self.silence_s)

    def run_job(
        self,
        entry: Callable[..., Any],
        args: Sequence[Any],
        places: Sequence[tuple[AgentConnection, World]],
        *,
        agreed: HostAgreement,
        exported: dict[str, str],
        context: LaunchContext,
    ) -> Any:
        """The job over agents, each with the place of a rank that it starts."""
        threads = 0 if self.threads_per_process == "auto" else self.threads_per_process
        seats = [
            AgentSeat(agent, agreed.variables(world.node_rank, exported), threads)
            for agent, world in places
        ]
        worlds = tuple(world for _, world in places)
        workers = job.Workers(worlds, env=exported, threads=None, log_dir=context.log_dir)
        limits = job.JobTimeouts(startup_s=self.startup_timeout_s, grace_s=self.grace_s)
        transport = transport_over(seats, shown=self.output)
        return job.run(entry, args, workers=workers, transport=transport, limits=limits)
