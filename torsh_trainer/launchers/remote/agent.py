"""The far end of a launcher: starts workers on its host, and relays what they tell and print.

It hears and tells through a connection of which the launcher holds the other end (ssh's standard
streams, or a socket). The connection is its leash: once it ends, or nothing has come through it for
a while, all workers are asked to stop, a moment later killed, and the agent ends.

Messages are tuples of plain values (``launchers.messages``), so that the two ends can tell each
other their versions before anything else is opened. To here: ``("ask", what, values)``,
``("payload", bytes)``, ``("start", index, env, threads, speaks)``, ``("signal", index, number)``,
``("kill", index)``, ``("beat",)``. From here: ``("answer", values)``, ``("told", index, bytes)``,
``("printed", index, stream, bytes)``, ``("words", index, text)``, ``("ended", index, code, why)``,
``("killed", index)``, ``("leaving", seconds)``, ``("beat",)``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torsh_trainer.environments.world import World
from torsh_trainer.errors import TorshError
from torsh_trainer.launchers.hardware import cores
from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.local_transport import LocalTransport, ProcessSlot
from torsh_trainer.launchers.messages import Inbox, Sender
from torsh_trainer.launchers.remote.looking import QUESTIONS
from torsh_trainer.launchers.transport import WorkerHandle, WorkerStart

MARK = b"\0torsh-agent\n"
"""Comes first: what a login prints before it is no message."""
BEAT_S = 1.0
GRACE_S = 5.0
"""How long workers may take to stop once the connection has ended."""
_POLL_S = 0.1
_CHUNK = 1 << 16
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_OURS = ("PYTHONSAFEPATH",)
"""Variables that the agent itself was started with."""


@dataclass(eq=False)
class HostedWorker:
    """A worker of this host; it prints into ``streams``: descriptor -> ``out`` or ``err``."""

    index: int
    handle: WorkerHandle
    streams: dict[int, str]
    words: str = ""
    ended: bool = False
    asked: bool = False

    def print_into(self, sender: Sender) -> None:
        """Relays what it has printed since."""
        for descriptor, stream in list(self.streams.items()):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(descriptor, _CHUNK):
                    sender.send("printed", self.index, stream, data)
                os.close(descriptor)
                del self.streams[descriptor]


class HostAgent:
    """Does what comes through the connection, until that ends."""

    def __init__(self, inbox: Inbox, sender: Sender, *, slot: ProcessSlot | None = None) -> None:
        self._inbox, self._sender = inbox, sender
        self._slot = slot
        self._payload: Payload | None = None
        self._transport: LocalTransport | None = None
        self._listener: socket.socket | None = None
        self._workers: dict[int, HostedWorker] = {}
        self._messages: deque[tuple[Any, ...]] = deque()
        self._own_error = os.dup(2)
        self._own_streams = _take_standard_streams()
        self._wake, self._woken = os.pipe()
        self._silence_s = 60.0
        """Until the launcher says how long it may be silent."""
        self._leaves = False
        """Workers are being ended from here: how is no news of theirs."""

    def serve(self) -> None:
        """Relays until the connection ends; does not return.

        What ends it otherwise is told on what was standard error: the guards end the workers.
        """
        threading.Thread(target=self._hear, name="leash", daemon=True).start()
        try:
            self._relay_all()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the launcher hears it
            os.write(self._own_error, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)

    def _relay_all(self) -> None:
        beaten_s = 0.0
        while True:
            watched = [self._wake]
            for worker in self._workers.values():
                watched += worker.streams
                if not worker.ended:
                    watched.append(worker.handle.descriptor)
            ready, _, _ = select.select(watched, [], [], _POLL_S)
            if self._wake in ready:
                os.read(self._wake, _CHUNK)
            while self._messages:
                self._do(*self._messages.popleft())
            for worker in self._workers.values():
                self._relay(worker)
            if time.monotonic() - beaten_s > BEAT_S:
                beaten_s = time.monotonic()
                self._sender.send("beat")

    # -- what the launcher says ------------------------------------------------------------------

    def _hear(self) -> None:
        """The leash: a thread, since whoever sends may wait for ever where nobody reads."""
        heard_s = time.monotonic()
        while time.monotonic() - heard_s < self._silence_s:
            if select.select([self._inbox.fd], [], [], _POLL_S)[0]:
                messages = list(self._inbox.receive())
                heard_s = time.monotonic()
                if not messages and self._inbox.ended:
                    self._leaves = True
                    break
                self._messages += [message for message in messages if message[0] != "beat"]
                os.write(self._woken, b".")
        else:
            self._leaves = True
            self._messages.append(("leave",))  # told by whoever may wait
            os.write(self._woken, b".")
        self._end()

    def _do(self, what: str, *rest: Any) -> None:
        match what:
            case "ask":
                self._sender.send("answer", self._answer(*rest))
            case "payload":
                self._payload = take_payload(rest[0])
            case "start":
                self._start(*rest)
            case "signal":
                worker = self._workers.get(rest[0])
                if worker is not None:
                    worker.asked = worker.asked or rest[1] == signal.SIGUSR2
                    worker.handle.send_signal(rest[1])
            case "leave":
                self._sender.send("leaving", self._silence_s)
            case "kill":
                if rest[0] in self._workers:
                    self._workers[rest[0]].handle.kill()
                    self._relay(self._workers[rest[0]])
                self._sender.send("killed", rest[0])

    def _answer(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        try:
            if what == "listen":
                return self._listen(**values)
            if what == "settle":
                return self._settle(**values)
            return QUESTIONS[what](**values)
        except TorshError as error:
            return {"refused": error.sentence, "fix": error.fix}
        except OSError as error:
            known = error.errno in errno.errorcode  # Python puts more into the words of some
            words = os.strerror(error.errno) if known and error.errno else str(error)
            return {"refused": words, "fix": ""}

    def _settle(self, *, folder: str, silence_s: float) -> dict[str, Any]:
        """Goes to the working directory, and takes how long the launcher may be silent."""
        self._silence_s = silence_s
        place = Path(folder).expanduser() if folder else Path.cwd()
        os.chdir(place)
        return {"folder": str(Path.cwd())}

    def _listen(self, *, address: str, port: int) -> dict[str, Any]:
        """Takes a port at which the processes of the job will meet, for rank 0."""
        if self._listener is not None:
            self._listener.close()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=1024)
        return {"port": self._listener.getsockname()[1]}

    # -- workers ---------------------------------------------------------------------------------

    def _start(self, index: int, env: dict[str, str], threads: int, speaks: bool) -> None:
        assert self._payload is not None
        env = {**{k: v for k, v in os.environ.items() if k not in _OURS}, **env}
        if threads or "OMP_NUM_THREADS" not in env:
            world = self._payload.worlds[index]
            count = threads or max(1, cores() // world.local_size)
            env |= dict.fromkeys(_THREADS, str(count))
        try:
            if self._transport is None:
                self._transport = self._open_transport(self._payload)
            near, far = os.pipe()  # one that speaks has our own streams, and closes these
            os.set_blocking(near, False)
            output = None if speaks else Path(f"/dev/fd/{far}")
            try:
                start = WorkerStart(index, self._payload.worlds[index], env, output=output)
                handle = self._transport.start(start)
            finally:
                os.close(far)
        except TorshError as error:
            self._sender.send("refused", index, error.sentence, error.fix)
            return
        streams = {near: "out"}
        if not self._workers:  # who speaks is the first; elsewhere it is the agent's own words
            streams |= self._own_streams
        self._workers[index] = HostedWorker(index, handle, streams)

    def _open_transport(self, payload: Payload) -> LocalTransport:
        if self._listener is not None:
            listen_fd = self._listener.fileno()
            worlds = tuple(_with_listener(world, listen_fd) for world in payload.worlds)
            self._payload = payload = replace(payload, worlds=worlds)
        seats = () if self._slot is None else [self._slot] * len(payload.worlds)
        return LocalTransport(payload, listener=self._listener, seats=seats)

    def _relay(self, worker: HostedWorker) -> None:
        code = worker.handle.exit_code()
        for message in worker.handle.receive():
            self._sender.send("told", worker.index, pickle.dumps(message))
        worker.print_into(self._sender)
        if worker.ended or self._leaves:
            return
        if worker.asked or code is not None:
            now = worker.handle.last_words()
            if now != worker.words:
                worker.words = now
                self._sender.send("words", worker.index, now)
        if code is not None:
            worker.ended = True
            why = worker.handle.explain_kill() if code == -signal.SIGKILL else ""
            self._sender.send("ended", worker.index, code, why)

    def _end(self) -> None:
        """Ends every worker, and this process, whatever its main thread waits for."""
        if self._transport is not None:
            workers = list(self._workers.values())
            for worker in workers:
                worker.handle.send_signal(signal.SIGTERM)
            end_s = time.monotonic() + GRACE_S
            while time.monotonic() < end_s:
                if all(worker.handle.exit_code() is not None for worker in workers):
                    break
                time.sleep(_POLL_S)
            for worker in workers:
                worker.handle.kill()
        os._exit(0)


def take_payload(data: bytes) -> Payload:
    """The payload as it serves here: modules are looked for where this Python has them.

    The launcher's folders of its own code come before and after those of the installation here.
    """
    front, back, payload = pickle.loads(data)
    here = [path for path in sys.path if path not in ("", *front, *back)]
    return replace(payload, path=[*front, *here, *back])


def _with_listener(world: World, descriptor: int) -> World:
    if not world.is_rank_zero or world.rendezvous is None:
        return world
    return replace(world, rendezvous=replace(world.rendezvous, listen_fd=descriptor))


def _take_standard_streams() -> dict[int, str]:
    """From here on what is printed goes into pipes, of which these are the other ends."""
    streams = {}
    for descriptor, name in ((1, "out"), (2, "err")):
        near, far = os.pipe()
        os.dup2(far, descriptor)
        os.close(far)
        os.set_blocking(near, False)
        streams[near] = name
    return streams


@contextlib.contextmanager
def keep_standard_streams() -> Iterator[tuple[int, int]]:
    """Copies of standard input and output, a connection; standard input is empty afterwards."""
    near, far = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    yield near, far


def main() -> None:
    """Serves at the other end of ssh: ``python -m torsh_trainer.launchers.remote.agent``."""
    signal.signal(signal.SIGHUP, lambda *_: None)  # the leash tells, and leaves time to stop
    with keep_standard_streams() as (near, far):
        os.write(far, MARK)
        HostAgent(Inbox(near), Sender(far)).serve()


if __name__ == "__main__":
    main()
