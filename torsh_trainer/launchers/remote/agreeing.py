"""From connections to a job: what all hosts have in common is looked at, and where they meet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.environments.world import Rendezvous
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.remote.checks import check_code, check_shared, check_versions
from torsh_trainer.launchers.remote.connection import AgentConnection, ask_all
from torsh_trainer.launchers.remote.meeting import choose_meeting
from torsh_trainer.launchers.remote.paths import split_path

PATIENCE_S = 10.0
"""How long a file may take to be seen on another host (NFS keeps what it knew for a while)."""


@dataclass(frozen=True)
class Terms:
    """What a launcher asks of its hosts: knobs of ``Ssh`` and ``MpirunLauncher`` by their names."""

    folder: str | None
    address: str | None
    port: int | None
    startup_timeout_s: float
    silence_s: float


@dataclass(frozen=True)
class HostAgreement:
    """Where the processes meet; ``interfaces`` are those by which hosts get there."""

    meeting: Rendezvous
    interfaces: tuple[str, ...]

    def variables(self, node: int, exported: dict[str, str]) -> dict[str, str]:
        """What the processes of a host have beside ``exported``.

        gloo takes the address of the host's own name, which many hosts have on the loopback.
        """
        name = self.interfaces[node]
        taken = not name or "GLOO_SOCKET_IFNAME" in exported
        return {} if taken else {"GLOO_SOCKET_IFNAME": name}


def agree(
    leaders: Sequence[AgentConnection],
    others: Sequence[AgentConnection],
    *,
    terms: Terms,
    context: LaunchContext,
) -> HostAgreement:
    """Holds hosts against each other; ``leaders`` are one agent of each, ``others`` the rest.

    Raises:
        ConfigError: versions, folders or code differ, or an address is the loopback's.
        ResourceError: a host is not reached, or a port is in use.
    """
    if terms.folder is not None and context.log_dir and not context.log_dir.is_absolute():
        raise ConfigError(
            f"launcher.folder={terms.folder}, and the run folder {context.log_dir.parent} is told "
            "from here: ranks would put it elsewhere",
            fix="give the run folder by its whole path (run_dir), or leave launcher.folder=null",
        )
    patient = terms.startup_timeout_s
    greetings = ask_all(leaders, "greet", [{}] * len(leaders), timeout_s=patient)
    check_versions(leaders, greetings)
    here = {"folder": terms.folder or str(Path.cwd()), "silence_s": terms.silence_s}
    agents = [*leaders, *others]
    settled = ask_all(agents, "settle", [here] * len(agents), timeout_s=patient)
    for agent, answer in zip(agents, settled, strict=True):
        if "refused" in answer:
            raise ConfigError(
                f"{agent.host} cannot work in {here['folder']}: {answer['refused']}",
                fix="make that folder there, or name another: launcher.folder",
            )
    runs = Path.cwd() if context.log_dir is None else context.log_dir.parent
    check_shared(leaders, runs.absolute(), timeout_s=patient, patience_s=PATIENCE_S)
    check_code(leaders, _own_folders(), timeout_s=patient)
    meeting, interfaces = choose_meeting(
        leaders, greetings, address=terms.address, port=terms.port, timeout_s=patient
    )
    return HostAgreement(meeting, tuple(interfaces))


def _own_folders() -> list[str]:
    """Folders of the user's code, those of this package left out: it is compared by itself."""
    front, _ = split_path(sys.path)
    root = Path(__file__).parents[3]
    folders = dict.fromkeys(str(Path(entry).absolute()) for entry in (*front, "."))
    return [folder for folder in folders if Path(folder) != root and Path(folder).is_dir()]
