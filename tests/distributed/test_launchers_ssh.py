"""``launcher=ssh`` through a real server of ssh here: the contracts, and what it refuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.isolation import Sshd
from torsh_trainer.hosts.ssh import SshWords
from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.remote.by_ssh import AgentCommand, SshConnection
from torsh_trainer.launchers.remote.connection import close_all
from torsh_trainer.launchers.remote.transport import AgentSeat, AgentTransport
from torsh_trainer.launchers.ssh import Ssh
from torsh_trainer.launchers.transport import Transport
from torsh_trainer.testing import LauncherContract, TransportContract

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()


class TestLauncher(LauncherContract):
    launcher = Ssh(hosts=(HERE,))

    @pytest.fixture(autouse=True)
    def _reach(self, sshd: Sshd) -> None:
        type(self).launcher = Ssh(hosts=(f"{HERE}:2",), ssh_config=sshd.config)


@pytest.mark.exhaustive  # the launcher starts, tells and ends its workers by it
class TestTransport(TransportContract):
    @pytest.fixture(autouse=True)
    def _reach(self, sshd: Sshd) -> Iterator[None]:
        self.ssh = SshWords(("-F", str(sshd.config)))
        self.opened: list[SshConnection] = []
        yield
        close_all(self.opened)

    def transport(self, payload: Payload) -> Transport:
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))}
        command = AgentCommand(self.ssh, sys.executable, env)
        connection = SshConnection(HERE, command, silence_s=60.0)
        self.opened.append(connection)
        return AgentTransport(payload, seats=[AgentSeat(connection)] * 2, shown="rank_zero")
