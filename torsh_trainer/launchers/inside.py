"""Inside a worker process: what it is handed, what it does, how it ends.

It takes the entry from its parent, calls it, and tells how it went. It never outlives its parent:
see ``guard``.
"""

from __future__ import annotations

import atexit
import faulthandler
import mmap
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

import cloudpickle

from torsh_trainer.environments.world import World
from torsh_trainer.launchers import guard
from torsh_trainer.launchers.failures import exit_code_of, failure_of
from torsh_trainer.launchers.messages import Sender
from torsh_trainer.utils.importing import collector_at_rest
from torsh_trainer.utils.signals import ends_with_its_run


class Handles(NamedTuple):
    """What a worker inherits: descriptors, its place on this node, its parent."""

    place: int
    parent_pid: int
    payload: int
    status: int
    leash: int
    stack: int

    def argv(self) -> list[str]:
        """As words of a command line."""
        return [f"{name}={value}" for name, value in self._asdict().items()]

    @classmethod
    def parse(cls, words: list[str]) -> Handles:
        """The inverse of ``argv``."""
        return cls(**{name: int(value) for name, _, value in (w.partition("=") for w in words)})


@dataclass(frozen=True)
class Payload:
    """What all workers of a node are given: the parent's surroundings, and the entry as bytes.

    ``call`` is a cloudpickle of ``(entry, args)``: it is opened only once ``path`` is in place.
    """

    worlds: tuple[World, ...]
    path: list[str]
    argv: list[str]
    python_path: str | None
    call: bytes


_sender: Sender | None = None
_told_failure = False


def report_ready() -> None:
    """Tells the launcher that this worker has started; without effect outside a worker.

    A worker is taken to have started when its entry is called. An entry with the attribute
    ``reports_ready = True`` says so itself, for instance once all processes have met, so that a
    process that hangs before counts as one that did not start.
    """
    if _sender is not None:
        _sender.send("ready")


def report_failure(error: BaseException, *, rank: int) -> bool:
    """Tells the launcher at once that this worker fails; False outside a worker.

    What comes between the failure and the worker's end may take long, or hang.
    """
    global _told_failure  # noqa: PLW0603  # one process, one worker
    if _sender is None:
        return False
    if not _told_failure:
        _told_failure = True
        _sender.send("failure", failure_of(error, rank=rank, time_s=time.monotonic()))
    return True


def main(words: list[str]) -> int:
    """Runs the worker; returns its exit code."""
    global _sender  # noqa: PLW0603  # one process, one worker
    handles = Handles.parse(words)
    _settle_signals()
    ends_with_its_run()
    for fd in (handles.payload, handles.status, handles.leash, handles.stack):
        os.set_inheritable(fd, False)
    guarding = guard.start(parent_pid=handles.parent_pid, leash=handles.leash)
    atexit.register(guarding.close)  # the first, so that it is the last: an end may hang as well
    faulthandler.enable(file=handles.stack)
    faulthandler.register(signal.SIGUSR2, file=handles.stack, all_threads=False)
    _sender = Sender(handles.status)
    with mmap.mmap(handles.payload, 0, prot=mmap.PROT_READ) as data:
        payload: Payload = pickle.loads(data)
    world = payload.worlds[handles.place]
    try:
        answer = _run(payload, handles.place)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent words it
        _drop_own_frames(error)
        report_failure(error, rank=world.rank)
        return exit_code_of(error)
    _sender.send("answer", answer)
    return 0


def _run(payload: Payload, place: int) -> bytes:
    """The pickled answer; only that of the first process here is ever asked for."""
    _take_surroundings(payload)
    with collector_at_rest():  # it imports what the entry needs
        entry, args = pickle.loads(payload.call)
    if not getattr(entry, "reports_ready", False):
        report_ready()
    answer = entry(payload.worlds[place], *args)
    return cloudpickle.dumps(answer if place == 0 else None)


def _drop_own_frames(error: BaseException) -> None:
    """A traceback starts where the user's code does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace


def _take_surroundings(payload: Payload) -> None:
    """Imports as the parent imports, and leaves no trace of how this process was started."""
    sys.path[:] = payload.path
    sys.argv[:] = payload.argv
    if payload.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = payload.python_path


def _settle_signals() -> None:
    """Until the entry installs handlers, a request to stop ends the process at once and quietly."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
