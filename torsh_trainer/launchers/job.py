"""The worker processes of one node, from their start to the end of the last one."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from torsh_trainer.errors import Interrupted, ResourceError, WorkerError
from torsh_trainer.launchers.failures import Failure, root_cause
from torsh_trainer.launchers.inside import Handles, Payload
from torsh_trainer.launchers.messages import Inbox
from torsh_trainer.launchers.oom import OomKills
from torsh_trainer.launchers.sending import pickled_call
from torsh_trainer.signals import signal_name
from torsh_trainer.user_code import place_in
from torsh_trainer.world import World

log = logging.getLogger(__name__)

MODULE = "torsh_trainer.launchers.worker"
POLL_S = 0.1
SETTLE_S = 2.0
"""After a failure the other workers have this long to fail as well, so that the cause is known."""
LOST_PEER_S = 5.0
"""While stopping: how long workers may take once one of them has ended without finishing."""
LAST_WORDS_S = 0.5
"""How long a hung worker may take to write down where it hangs, or a stopped one to end."""
PATIENCE_S = 0.5
"""A second SIGINT within this time is an echo of the first (a wrapper that forwards it)."""
UNKILLABLE_S = 10.0
"""A process may hang in the kernel (a dead network drive), where SIGKILL does not reach it."""
TAIL_LINES = 20

SIGBUS_HINT = "shared memory is usually full: fewer data workers, or a larger /dev/shm"


@dataclass(frozen=True)
class Limits:
    """How long a job waits, in seconds: for workers to start, and to stop when asked."""

    startup_s: float
    grace_s: float


@dataclass(frozen=True)
class Seat:
    """A place that another program (mpirun) holds for a process: how the process takes it.

    ``env`` is added to its variables, ``descriptors`` are inherited under their numbers, and
    ``cpus`` are the processors to which it is bound; None binds it to none.
    """

    env: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    cpus: frozenset[int] | None = None


@dataclass(frozen=True)
class Workers:
    """What to start: one process for each of ``worlds``, with the environment ``env``.

    ``threads`` None leaves OMP_NUM_THREADS as it is. ``log_dir`` takes ``rank-N.log`` of every
    rank but 0; None makes a folder that stays only if the job fails. ``seats`` are one for each
    process, or none.
    """

    worlds: tuple[World, ...]
    env: Mapping[str, str]
    threads: int | None
    log_dir: Path | None
    listener: socket.socket | None
    seats: Sequence[Seat] = ()

    def seat(self, index: int) -> Seat:
        """The place of a process; an empty one where nobody holds any."""
        return self.seats[index] if self.seats else Seat({})


def run(entry: Callable[..., Any], args: Sequence[Any], *, workers: Workers, limits: Limits) -> Any:
    """Calls ``entry(world, *args)`` in a process for each world; returns the first rank's answer.

    Raises:
        WorkerError: a worker failed or did not start.
        Interrupted: SIGINT or SIGTERM asked this process, or a worker, to stop.
        ConfigError: ``entry`` or ``args`` cannot be sent to another process.
        ResourceError: a process or a log file cannot be made.
    """
    payload = _pickled(entry, args, workers)
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(_log_folder(workers.log_dir))
        signals = stack.enter_context(_Signals())
        job = _Job(limits, signals, logs)
        stack.callback(job.close)
        job.start(workers, payload)
        return job.wait()


# -- one worker ----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Worker:
    """A process, and what it has told so far; ``speaks`` where its output is the parent's."""

    rank: int
    speaks: bool
    process: subprocess.Popen[bytes]
    inbox: Inbox
    stack: IO[bytes]
    log: Path
    ready: bool = False
    answer: bytes | None = None
    failure: Failure | None = None
    ended: bool = False
    oom_kills: OomKills = field(default_factory=OomKills)

    def listen(self) -> None:
        """Takes what has arrived, and notices the end of the process."""
        code = self.process.poll()
        for message in self.inbox.receive():
            match message:
                case ("ready",):
                    self.ready = True
                case ("answer", answer):
                    self.answer = answer
                case ("failure", failure):
                    self.failure = failure
        if code is not None and not self.ended:
            self.ended = True
            if self.answer is None and self.failure is None:
                self.failure = self._death(code)
            elif self.answer is not None and code != 0:
                log.warning("rank %d finished, then ended with %s", self.rank, _exit_words(code))

    def signal(self, number: int) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """Ends the process and whatever it started that stayed in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        try:
            self.process.wait(UNKILLABLE_S)
        except subprocess.TimeoutExpired:
            log.warning("rank %d (process %d) hangs in the kernel", self.rank, self.process.pid)

    def last_words(self) -> str:
        """The stack that faulthandler wrote, of a crash or of a hang."""
        self.stack.seek(0)
        return self.stack.read().decode(errors="replace").strip()

    def _death(self, code: int) -> Failure:
        hint = {-signal.SIGKILL: self.oom_kills.since, -signal.SIGBUS: lambda: SIGBUS_HINT}
        output = "its last output is above" if self.speaks else f"its last output is in {self.log}"
        fix = "; ".join(filter(None, [hint.get(code, str)(), output]))
        if code < 0:
            place = place_in(self.last_words())
            at = f" at {place}" if place else ""
            sentence = f"rank {self.rank} was killed by {_exit_words(code)}{at}"
        else:
            sentence = f"rank {self.rank} ended before it was done, with {_exit_words(code)}"
        return Failure(
            self.rank,
            time.monotonic(),
            sentence,
            fix=fix,
            traceback=self.last_words() or _tail(self.log),
            worded=True,
        )

    def close(self) -> None:
        os.close(self.inbox.fd)
        self.stack.close()


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _tail(file: Path) -> str:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL_LINES:])


# -- all of them ---------------------------------------------------------------------------------


class _Job:
    """Starts workers, waits for them, and ends them; nothing of it is left after ``close``."""

    def __init__(self, limits: Limits, signals: _Signals, logs: _Logs) -> None:
        self._limits = limits
        self._signals = signals
        self._logs = logs
        self._workers: list[_Worker] = []
        self._leash, self._leash_hand = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._started_s = time.monotonic()

    def start(self, workers: Workers, payload: IO[bytes]) -> None:
        """Starts every process."""
        with payload:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            for index in range(len(workers.worlds)):
                worker = _spawn(index, workers, payload, self._leash, self._logs.path)
                self._workers.append(worker)
                self._selector.register(worker.inbox.fd, selectors.EVENT_READ, worker)
        if workers.listener is not None:
            workers.listener.close()  # rank 0 holds it now: with it dies the port

    def wait(self) -> Any:
        """The first rank's answer, once every worker has ended."""
        while True:
            self._listen()
            if self._signals.stop is not None:
                raise self._stopped()
            if self._failures():
                raise self._failed()
            if all(worker.answer is not None for worker in self._workers):
                break
            self._check_start()
        self._until_ended(time.monotonic() + self._limits.grace_s)
        if self._signals.stop is not None:
            raise self._stopped()
        for worker in self._workers:
            if not worker.ended:
                log.warning("rank %d finished, but did not end; it was killed", worker.rank)
        return self._answer()

    def close(self) -> None:
        """Kills what still runs."""
        for worker in self._workers:
            worker.kill()
            worker.close()
        self._selector.close()
        os.close(self._leash_hand)
        os.close(self._leash)

    # -- watching --------------------------------------------------------------------------------

    def _listen(self) -> None:
        for key, _ in self._selector.select(POLL_S):
            worker: _Worker = key.data
            worker.listen()
            if worker.ended:
                self._selector.unregister(key.fileobj)
        for worker in self._workers:
            worker.listen()
        for number in self._signals.take():
            for worker in self._workers:
                worker.signal(number)

    def _until_ended(self, deadline_s: float) -> None:
        while not all(w.ended for w in self._workers) and time.monotonic() < deadline_s:
            self._listen()

    def _failures(self) -> list[Failure]:
        return [w.failure for w in self._workers if w.failure is not None]

    def _answer(self) -> Any:
        answer = self._workers[0].answer
        return None if answer is None else pickle.loads(answer)

    def _check_start(self) -> None:
        late = [w for w in self._workers if not w.ready]
        if not late or time.monotonic() < self._started_s + self._limits.startup_s:
            return
        for worker in late:
            worker.signal(signal.SIGUSR2)  # faulthandler writes down where it hangs
        time.sleep(LAST_WORDS_S)
        ranks = ", ".join(str(w.rank) for w in late)
        stacks = [f"rank {w.rank}:\n{w.last_words()}" for w in late]
        late[0].failure = Failure(
            late[0].rank,
            time.monotonic(),
            f"rank{'s' if len(late) > 1 else ''} {ranks} did not start within "
            f"{self._limits.startup_s:g} s",
            fix=f"launcher.startup_timeout_s allows more time; output and stack are in "
            f"{late[0].log}",
            traceback="\n\n".join(stacks),
            cause_facts={"ranks": [w.rank for w in late]},
            worded=True,
        )

    # -- ending ----------------------------------------------------------------------------------

    def _failed(self) -> WorkerError | Interrupted:
        """Ends the job after a failure; the error that tells its cause."""
        began_s = time.monotonic()
        while not all(w.ended for w in self._workers):
            stopping = all(failure.interrupted for failure in self._failures())
            patience_s = self._limits.grace_s if stopping else SETTLE_S
            if time.monotonic() > began_s + patience_s or self._signals.impatient:
                break
            self._listen()
        where = self._whereabouts() if root_cause(self._failures()).collateral else []
        self._end()
        failures = self._failures()
        for failure in failures:
            self._note(failure)
        cause = root_cause(failures)
        if cause.interrupted:
            return self._interrupted(failures)
        return self._worker_error(cause, where=where)

    def _whereabouts(self) -> list[str]:
        """What the workers do that a failed one may have waited for, as far as is known."""
        silent = [w for w in self._workers if w.ready and not w.ended and w.failure is None]
        for worker in silent:
            worker.signal(signal.SIGUSR2)  # faulthandler writes down where it is
        stacks = self._settled([w for w in silent if w.answer is None])
        places = {rank: place_in(stack) for rank, stack in stacks.items()}
        ended = [f"rank {w.rank} has finished" for w in self._workers if w.answer is not None]
        return ended + [f"rank {rank} was at {place}" for rank, place in places.items() if place]

    def _settled(self, workers: Sequence[_Worker]) -> dict[int, str]:
        """By rank, the stacks that were asked for, once they grow no more, or after SETTLE_S."""
        deadline_s = time.monotonic() + SETTLE_S
        stacks = {w.rank: "" for w in workers}
        while not all(w.ended for w in workers) and time.monotonic() < deadline_s:
            self._until_ended(time.monotonic() + POLL_S)
            before, stacks = stacks, {w.rank: w.last_words() for w in workers}
            if all(stacks.values()) and stacks == before:
                break
        return stacks

    def _end(self) -> None:
        """SIGTERM, a moment, and SIGKILL for whole sessions; ends by these are no failures."""
        if all(worker.ended for worker in self._workers):
            return
        failed = [(w, w.failure) for w in self._workers]
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        self._until_ended(time.monotonic() + LAST_WORDS_S)
        for worker, failure in failed:
            worker.kill()
            worker.ended = True
            worker.failure = failure

    def _stopped(self) -> Interrupted:
        """Ends the job after a signal: the workers have been told, and may save and finish."""
        deadline_s = time.monotonic() + self._limits.grace_s
        lost = False
        while not all(w.ended for w in self._workers) and not self._signals.impatient:
            if not lost and any(f for f in self._failures() if not f.interrupted):
                lost = True
                deadline_s = min(deadline_s, time.monotonic() + LOST_PEER_S)
            if time.monotonic() > deadline_s:
                break
            self._listen()
        killed = [w.rank for w in self._workers if not w.ended]
        self._end()
        failures = self._failures()
        for failure in failures:
            self._note(failure)
        return self._interrupted(failures, killed=killed)

    def _interrupted(
        self, failures: Sequence[Failure], *, killed: Sequence[int] = ()
    ) -> Interrupted:
        told = sorted((f for f in failures if f.interrupted), key=lambda f: f.rank)
        number = self._signals.stop or next(
            (f.cause_facts["signal"] for f in told if "signal" in f.cause_facts), signal.SIGINT
        )
        name = signal_name(number)
        facts: dict[str, Any] = {"signal": int(number), "answer": self._answer()}
        if killed:
            facts["killed"] = list(killed)
        said = next((f for f in told if f.cause == Interrupted.__name__), None)
        if said is not None:
            return Interrupted(said.sentence, fix=said.fix, **{**said.cause_facts, **facts})
        broken = [f for f in failures if f.cause and not f.interrupted and not f.collateral]
        self._logs.keep = bool(broken or killed)
        if broken:
            cause = root_cause(broken)
            words = f"stopped by {name}, and while stopping {cause.sentence}"
            return Interrupted(words, fix=cause.fix or self._where(cause), **facts)
        if killed:
            ranks = ", ".join(map(str, killed))
            return Interrupted(
                f"stopped by {name}; rank {ranks} had to be killed",
                fix="launcher.grace_s gives more time to save",
                **facts,
            )
        return Interrupted(f"stopped by {name}", **facts)

    def _worker_error(self, cause: Failure, *, where: Sequence[str]) -> WorkerError:
        self._logs.keep = True
        worker = next(w for w in self._workers if w.rank == cause.rank)
        error = WorkerError(
            cause.sentence,
            fix="; ".join([*where, cause.fix if cause.worded else self._where(cause)]),
            rank=cause.rank,
            traceback=cause.traceback,
            log=str(worker.log),
            cause=cause.cause,
            cause_exit_code=cause.cause_exit_code,
            cause_facts=cause.cause_facts,
        )
        if cause.traceback:
            error.__cause__ = WorkerTraceback(cause.traceback)
        return error

    def _where(self, failure: Failure) -> str:
        worker = next(w for w in self._workers if w.rank == failure.rank)
        return f"its traceback is in {worker.log}"

    def _note(self, failure: Failure) -> None:
        """Adds a failure to its worker's log, which thereby exists for rank 0 as well."""
        worker = next(w for w in self._workers if w.rank == failure.rank)
        with contextlib.suppress(OSError), worker.log.open("a") as file:
            file.write(f"{failure.sentence}\n{failure.traceback}\n")


class WorkerTraceback(Exception):
    """The traceback of an error in another process, as text."""

    def __str__(self) -> str:
        return f"\n\nin the worker:\n{self.args[0]}"


# -- starting ------------------------------------------------------------------------------------


def _pickled(entry: Callable[..., Any], args: Sequence[Any], workers: Workers) -> IO[bytes]:
    """An unnamed file, so that a job that dies leaves nothing behind."""
    payload = Payload(
        worlds=workers.worlds,
        path=[folder or str(Path.cwd()) for folder in sys.path],
        argv=list(sys.argv),
        python_path=workers.env.get("PYTHONPATH"),
        call=pickled_call(entry, args),
    )
    try:
        file = tempfile.TemporaryFile(prefix="torsh-")  # noqa: SIM115  # the job closes it
        pickle.dump(payload, file)
        file.flush()
    except OSError as error:
        raise ResourceError(
            f"the run cannot be written down for its workers: {error}",
            fix="free some space, or point TMPDIR elsewhere",
        ) from error
    return file


def _spawn(index: int, workers: Workers, payload: IO[bytes], leash: int, log_dir: Path) -> _Worker:
    world, seat = workers.worlds[index], workers.seat(index)
    status, status_hand = os.pipe()
    stack = tempfile.TemporaryFile(prefix="torsh-")  # noqa: SIM115  # the worker's lifetime
    handles = Handles(index, os.getpid(), payload.fileno(), status_hand, leash, stack.fileno())
    inherited = [*handles[2:], *seat.descriptors]
    if world.rendezvous is not None and world.rendezvous.listen_fd is not None:
        inherited.append(world.rendezvous.listen_fd)
    file = log_dir / f"rank-{world.rank}.log"
    try:
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, status_hand)
            output = closing.enter_context(file.open("ab")) if index else None
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *handles.argv()],
                env={**_environment(world, workers), **seat.env},
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
            f"rank {world.rank} cannot be started: {error}",
            fix="fewer processes, or see the limits of this machine (ulimit -a, df)",
        ) from error
    return _Worker(world.rank, index == 0, process, Inbox(status), stack, file)


def _environment(world: World, workers: Workers) -> dict[str, str]:
    """The variables of a worker: the parent's, its place for other libraries, its threads."""
    env = {k: v for k, v in workers.env.items() if not k.startswith("TORCHELASTIC_")}
    root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), root]))
    env["PYTHONUNBUFFERED"] = "1"  # what a killed worker said last is in its log
    env |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "NODE_RANK": str(world.node_rank),
    }
    if world.rendezvous is not None:
        env["MASTER_ADDR"] = world.rendezvous.address
        env["MASTER_PORT"] = str(world.rendezvous.port)
    if workers.threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            env[name] = str(workers.threads)
    return env


@dataclass
class _Logs:
    path: Path
    keep: bool = False


@contextlib.contextmanager
def _log_folder(wanted: Path | None) -> Iterator[_Logs]:
    """The folder for logs; one of our own making goes again when nothing failed."""
    try:
        if wanted is not None:
            wanted.mkdir(parents=True, exist_ok=True)
        logs = _Logs(wanted or Path(tempfile.mkdtemp(prefix="torsh-logs-")))
    except OSError as error:
        raise ResourceError(
            f"the folder for logs cannot be made: {error}", fix="choose another run directory"
        ) from error
    try:
        yield logs
    finally:
        if wanted is None and not logs.keep:
            shutil.rmtree(logs.path, ignore_errors=True)


# -- signals -------------------------------------------------------------------------------------


@dataclass
class _Signals:
    """Within the block, requests to stop become values; the handlers before it come back after.

    Off the main thread, where Python allows no handlers, nothing is caught. A signal that is
    ignored (``nohup``, a background job of a shell) stays ignored. SIGUSR1, SLURM's warning ahead
    of the time limit, is passed on, and then given to whoever handled it before.
    """

    stop: int | None = None
    impatient: bool = False
    _stopped_s: float = 0.0
    _pending: list[int] = field(default_factory=list)
    _previous: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                previous = signal.getsignal(number)
                if previous is not signal.SIG_IGN and previous is not None:
                    self._previous[number] = previous
                    signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take(self) -> Iterable[int]:
        """Signals that are to be passed on to the workers, each once."""
        pending, self._pending = self._pending, []
        return pending

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._pending.append(number)
            if callable(previous := self._previous[number]):
                previous(number, frame)
        elif self.stop is None:
            self.stop = number
            self._stopped_s = time.monotonic()
            self._pending.append(number)
        elif number == signal.SIGINT and time.monotonic() > self._stopped_s + PATIENCE_S:
            self.impatient = True
