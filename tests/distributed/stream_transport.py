"""A transport that knows its workers through a stream alone, as one over ssh would.

An agent beside each worker (this file, run as a program) starts it there by the local transport,
and talks with the job over its standard streams: what it is told comes by stdin, what the worker
tells goes by stdout, and what it prints by stderr. The end of stdin is the end of the connection.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ResourceError
from torsh_trainer.launchers import job
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.local_transport import LocalTransport
from torsh_trainer.launchers.messages import Inbox, Sender
from torsh_trainer.launchers.transport import Transport, WorkerHandle, WorkerStart

POLL_S = 0.02
PATIENCE_S = 60.0


class StreamTransport(Transport):
    """Starts an agent for each worker; with ssh before its command this would be another host."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._handles: list[StreamHandle] = []

    def start(self, start: WorkerStart) -> WorkerHandle:
        root = str(Path(__file__).parents[2])
        with contextlib.ExitStack() as closing:
            output = closing.enter_context(start.output.open("ab")) if start.output else 1
            try:
                agent = subprocess.Popen(
                    [sys.executable, __file__],
                    env={**os.environ, "PYTHONPATH": root},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise ResourceError(
                    f"rank {start.world.rank} cannot be started: {error}"
                ) from error
        handle = StreamHandle(agent)
        handle.send("start", self._payload, replace(start, output=None))
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        for handle in self._handles:
            handle.disconnect()


class StreamHandle(WorkerHandle):
    """The near end of the stream to an agent."""

    def __init__(self, agent: subprocess.Popen[bytes]) -> None:
        assert agent.stdin is not None
        assert agent.stdout is not None
        self._agent, self._stdin, self._stdout = agent, agent.stdin, agent.stdout
        self._sender = Sender(agent.stdin.fileno())
        self._inbox = Inbox(agent.stdout.fileno())
        self._messages: deque[tuple[Any, ...]] = deque()
        self._code: int | None = None
        self._words = ""
        self._kills = 0

    def send(self, *message: Any) -> None:
        if not self._stdin.closed:
            self._sender.send(*message)

    def disconnect(self) -> None:
        self._stdin.close()

    @property
    def descriptor(self) -> int:
        return self._inbox.fd

    def receive(self) -> Iterator[tuple[Any, ...]]:
        self._take()
        while self._messages:
            yield self._messages.popleft()

    def exit_code(self) -> int | None:
        self._take()
        return self._code

    def send_signal(self, number: int) -> None:
        self.send("signal", number)

    def kill(self) -> None:
        wanted = self._kills + 1
        self.send("kill")
        end = time.monotonic() + PATIENCE_S
        while self._agent.poll() is None and time.monotonic() < end:
            self._take()
            if self._kills >= wanted and self._code is not None:
                return
            time.sleep(POLL_S)
        self._take()

    def last_words(self) -> str:
        self._take()
        return self._words

    def close(self) -> None:
        self.disconnect()
        self._agent.wait(PATIENCE_S)
        self._stdout.close()

    def _take(self) -> None:
        lost = self._agent.poll()  # before the last look: what it has written by then is there
        for name, *rest in self._inbox.receive():
            if name == "told":
                self._messages.append(rest[0])
            elif name == "ended":
                self._code = rest[0]
            elif name == "words":
                self._words = rest[0]
            elif name == "killed":
                self._kills += 1
        if lost is not None and self._code is None:
            self._code = lost or 255  # as ssh says that a connection was lost


@dataclass(frozen=True)
class Streamed(Launcher):
    """Two processes, each behind its agent, which serve their meeting themselves."""

    name = "streamed"

    def launch(self, entry: Callable[..., Any], *args: Any, context: LaunchContext) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as free:
            meeting = Rendezvous("127.0.0.1", free.getsockname()[1])
        worlds = tuple(
            World(rank, 2, rank, 2, rendezvous=meeting, source="local") for rank in range(2)
        )
        workers = job.Workers(worlds, env=context.env, threads=1, log_dir=context.log_dir)
        limits = job.JobTimeouts(startup_s=240.0, grace_s=25.0)
        return job.run(entry, args, workers=workers, transport=StreamTransport, limits=limits)


# -- the far end ----------------------------------------------------------------------------------


def agent() -> None:
    """Starts one worker, and relays until it has ended and the connection too."""
    sender = Sender(os.dup(1))
    os.dup2(2, 1)  # the worker prints where errors go: stdout is for messages
    inbox = Inbox(0)
    while not (first := list(inbox.receive())):
        select.select([0], [], [])
    _, payload, start = first[0]
    transport = LocalTransport(payload)
    worker = transport.start(start)
    transport.all_started()
    connected, ended, words = True, False, ""
    while connected or not ended:
        ready = select.select([0] if connected else [], [], [], POLL_S)[0]
        for name, *rest in list(inbox.receive()) if ready else ():
            ready = []
            if name == "signal":
                worker.send_signal(rest[0])
            elif name == "kill":
                worker.kill()
                sender.send("killed")
        if ready and connected:  # readable, and nothing came
            connected = False
            transport.close()
        code = worker.exit_code()
        for message in worker.receive():
            sender.send("told", message)
        if (now := worker.last_words()) != words:
            words = now
            sender.send("words", words)
        if code is not None and not ended:
            ended = True
            sender.send("ended", code)
    worker.kill()


if __name__ == "__main__":
    agent()
