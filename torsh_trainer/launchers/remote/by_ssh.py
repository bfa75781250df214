"""Connections over ssh: its client is started here, and an agent by it on the other host."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torsh_trainer.errors import ResourceError
from torsh_trainer.hosts.ssh import KnobNames, SshWords, explain_end, quote_remote
from torsh_trainer.launchers.messages import Sender
from torsh_trainer.launchers.remote.connection import AgentConnection, MarkedInbox

AGENT = "torsh_trainer.launchers.remote.agent"
KNOBS = KnobNames(
    hosts="launcher.hosts",
    port="launcher.ssh_port=2222",
    python="launcher.python=/usr/bin/python3",
)
_END_S = 10.0
_LINES = 50
_POLL_S = 0.05


@dataclass(frozen=True)
class AgentCommand:
    """How an agent is started: the words of ssh, and the Python there with its variables."""

    ssh: SshWords
    python: str
    env: Mapping[str, str]

    def remote(self) -> str:
        """What the shell of the other host runs."""
        given = [f"{name}={value}" for name, value in self.env.items()]
        return "exec " + quote_remote(["env", *given, self.python, "-m", AGENT])

    def argv(self, host: str) -> list[str]:
        """The argument list that is started here."""
        return self.ssh.running(host, self.remote())


class SshConnection(AgentConnection):
    """A client of ssh, and the agent at its other end."""

    def __init__(self, host: str, command: AgentCommand, *, silence_s: float) -> None:
        self._command = command
        try:
            self._process = subprocess.Popen(
                command.argv(host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            )
        except OSError as error:
            raise ResourceError(
                f"{host}: ssh cannot be started: {error.strerror}",
                fix="see the limits of this machine (ulimit -a)",
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        inbox = MarkedInbox(os.dup(self._process.stdout.fileno()))
        sender = Sender(os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._process.stdout.close()
        self._marked = inbox
        self._said: deque[str] = deque(maxlen=_LINES)
        self._reading = threading.Thread(target=self._read_errors, daemon=True)
        self._reading.start()
        super().__init__(host, inbox, sender, silence_s=silence_s)

    def is_on_its_way(self) -> bool:
        """It has not reached the other host yet, and may."""
        self.take()
        return not self._marked.marked and self.lost is None

    def explain_end(self) -> ResourceError:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        self._reading.join(1)
        said = [line for line in self._said if line]
        tried = self._command.ssh.reaching(self.host)
        if self._marked.marked:
            lines = said or [self._describe_end(code)]
            return ResourceError(
                f"{self.host}: the connection ended ({lines[-1]})",
                fix=f"see whether the host is up: {tried} uptime",
                host=self.host,
            )
        said += self._marked.said.decode(errors="replace").split("\n")[-3:] if not said else []
        return explain_end(self.host, said, code=code, knobs=KNOBS, tried=tried)

    def hang_up(self) -> None:
        self._closing.set()
        if not self._sender.close():
            self._process.kill()

    def close(self) -> None:
        self.hang_up()
        if not self._marked.marked:  # it is still on its way there, and hears nothing
            self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._sender.close()
        self._reading.join(1)
        os.close(self._inbox.fd)

    def _describe_end(self, code: int | None) -> str:
        if code is not None and code < 0:
            return f"ssh was ended by signal {-code}"
        return "the agent there was ended" if code not in (None, 255) else "without a word of ssh"

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._said.append(line.decode(errors="replace").strip())


def connect_all(
    hosts: Sequence[str], command: AgentCommand, *, silence_s: float, at_once: int | None
) -> list[AgentConnection]:
    """Starts an agent on each host, side by side, and waits for none.

    But with ``at_once`` no more than so many are on their way at any time: a server of ssh drops
    connections that are not through yet from the tenth on (MaxStartups).
    """
    found: list[SshConnection] = []
    try:
        for host in hosts:
            while at_once is not None and sum(one.is_on_its_way() for one in found) >= at_once:
                time.sleep(_POLL_S)
            found.append(SshConnection(host, command, silence_s=silence_s))
    except BaseException:
        for connection in found:
            connection.close()
        raise
    return list(found)
