"""The transport of this machine: a worker is a subprocess, and hears and tells through pipes."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torsh_trainer.errors import ResourceError
from torsh_trainer.launchers.inside import Handles, Payload
from torsh_trainer.launchers.messages import Inbox
from torsh_trainer.launchers.oom import OomKills
from torsh_trainer.launchers.transport import Transport, WorkerHandle, WorkerStart

log = logging.getLogger(__name__)

MODULE = "torsh_trainer.launchers.worker"
UNKILLABLE_S = 10.0
"""A process may hang in the kernel (a dead network drive), where SIGKILL does not reach it."""


@dataclass(frozen=True)
class ProcessSlot:
    """A place that another program (mpirun) holds for a process: how the process takes it.

    ``env`` is added to its variables, ``descriptors`` are inherited under their numbers, and
    ``cpus`` are the processors to which it is bound; None binds it to none.
    """

    env: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    cpus: frozenset[int] | None = None


_NO_SLOT = ProcessSlot({})


class LocalTransport(Transport):
    """Starts workers as subprocesses, each in a session of its own.

    ``listener`` is the socket at which the processes meet, for the worker whose world names it; it
    is closed here once that worker has it. ``seats`` are one for each worker, or none.
    """

    def __init__(
        self,
        payload: Payload,
        *,
        listener: socket.socket | None = None,
        seats: Sequence[ProcessSlot] = (),
    ) -> None:
        self._listener = listener
        self._seats = seats
        self._payload = _write_payload(payload)
        # Its end of file tells a worker that this process is gone: nobody else can write to it.
        self._leash, self._leash_hand = os.pipe()

    def command(self, words: Sequence[str], start: WorkerStart) -> list[str]:
        """What is run: ``words``, or something that becomes it (``exec``) in the same process."""
        return list(words)

    def start(self, start: WorkerStart) -> WorkerHandle:
        seat = self._seats[start.index] if self._seats else _NO_SLOT
        status, status_hand = os.pipe()
        stack = tempfile.TemporaryFile(prefix="torsh-")  # noqa: SIM115  # the worker's lifetime
        handles = Handles(
            start.index,
            os.getpid(),
            self._payload.fileno(),
            status_hand,
            self._leash,
            stack.fileno(),
        )
        inherited = [*handles[2:], *seat.descriptors]
        meeting = start.world.rendezvous
        if meeting is not None and meeting.listen_fd is not None:
            inherited.append(meeting.listen_fd)
        try:
            with contextlib.ExitStack() as closing:
                closing.callback(os.close, status_hand)
                output = closing.enter_context(start.output.open("ab")) if start.output else None
                process = subprocess.Popen(
                    self.command([sys.executable, "-m", MODULE, *handles.argv()], start),
                    env={**_add_paths(start.env), **seat.env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                    pass_fds=inherited,
                    start_new_session=True,  # Ctrl-C reaches the parent alone, which passes it on
                )
                if seat.cpus is not None:
                    os.sched_setaffinity(process.pid, seat.cpus)
        except OSError as error:
            os.close(status)
            stack.close()
            raise ResourceError(
                f"rank {start.world.rank} cannot be started: {error}",
                fix="fewer processes, or see the limits of this machine (ulimit -a, df)",
            ) from error
        return LocalHandle(start.world.rank, process, Inbox(status), stack)

    def all_started(self) -> None:
        self._payload.close()
        if self._listener is not None:
            self._listener.close()  # rank 0 holds it now: with it dies the port

    def close(self) -> None:
        self._payload.close()
        os.close(self._leash_hand)
        os.close(self._leash)


class LocalHandle(WorkerHandle):
    """A subprocess of this process."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], inbox: Inbox, stack: IO[bytes]
    ) -> None:
        self._rank = rank
        self._process = process
        self._inbox = inbox
        self._stack = stack
        self._oom_kills = OomKills()

    @property
    def descriptor(self) -> int:
        return self._inbox.fd

    def receive(self) -> Iterator[tuple[Any, ...]]:
        return self._inbox.receive()

    def exit_code(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        try:
            self._process.wait(UNKILLABLE_S)
        except subprocess.TimeoutExpired:
            log.warning("rank %d (process %d) hangs in the kernel", self._rank, self._process.pid)

    def last_words(self) -> str:
        self._stack.seek(0)
        return self._stack.read().decode(errors="replace").strip()

    def explain_kill(self) -> str:
        return self._oom_kills.since()

    def close(self) -> None:
        os.close(self._inbox.fd)
        self._stack.close()


def _write_payload(payload: Payload) -> IO[bytes]:
    """An unnamed file, so that a job that dies leaves nothing behind."""
    try:
        file = tempfile.TemporaryFile(prefix="torsh-")  # noqa: SIM115  # the transport closes it
        pickle.dump(payload, file)
        file.flush()
    except OSError as error:
        raise ResourceError(
            f"the run cannot be written down for its workers: {error}",
            fix="free some space, or point TMPDIR elsewhere",
        ) from error
    return file


def _add_paths(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` of a process that is to import this package, and whose output is never held back."""
    root = str(Path(__file__).parents[2])
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(filter(None, [env.get("PYTHONPATH"), root])),
        "PYTHONUNBUFFERED": "1",  # what a killed worker said last is in its log
    }
