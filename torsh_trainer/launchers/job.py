"""The worker processes of one node, from their start to the end of the last one."""

from __future__ import annotations

import contextlib
import logging
import pickle
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_trainer.environments.world import World
from torsh_trainer.errors import Interrupted, WorkerError
from torsh_trainer.launchers.failures import Failure, root_cause
from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.logs import Logs, log_folder
from torsh_trainer.launchers.sending import pickle_call
from torsh_trainer.launchers.stop_signals import StopSignals
from torsh_trainer.launchers.transport import Transport, TransportFactory, WorkerStart
from torsh_trainer.launchers.workers import Worker
from torsh_trainer.utils.signals import signal_name
from torsh_trainer.utils.user_code import place_in

log = logging.getLogger(__name__)

POLL_S = 0.1
SETTLE_S = 2.0
"""After a failure the other workers have this long to fail as well, so that the cause is known."""
LOST_PEER_S = 5.0
"""While stopping: how long workers may take once one of them has ended without finishing."""
LAST_WORDS_S = 0.5
"""How long a hung worker may take to write down where it hangs, or a stopped one to end."""


@dataclass(frozen=True)
class JobTimeouts:
    """How long a job waits, in seconds: for workers to start, and to stop when asked."""

    startup_s: float
    grace_s: float


@dataclass(frozen=True)
class Workers:
    """What to start: one process for each of ``worlds``, with the environment ``env``.

    ``threads`` None leaves OMP_NUM_THREADS as it is. ``log_dir`` takes ``rank-N.log`` of every
    rank but 0; None makes a folder that stays only if the job fails.
    """

    worlds: tuple[World, ...]
    env: Mapping[str, str]
    threads: int | None
    log_dir: Path | None


def run(
    entry: Callable[..., Any],
    args: Sequence[Any],
    *,
    workers: Workers,
    transport: TransportFactory,
    limits: JobTimeouts,
) -> Any:
    """Calls ``entry(world, *args)`` in a process for each world; returns the first rank's answer.

    Raises:
        WorkerError: a worker failed or did not start.
        Interrupted: SIGINT or SIGTERM asked this process, or a worker, to stop.
        ConfigError: ``entry`` or ``args`` cannot be sent to another process.
        ResourceError: a process or a log file cannot be made.
    """
    payload = Payload(
        worlds=workers.worlds,
        path=[folder or str(Path.cwd()) for folder in sys.path],
        argv=list(sys.argv),
        python_path=workers.env.get("PYTHONPATH"),
        call=pickle_call(entry, args),
    )
    with contextlib.ExitStack() as stack:
        opened = transport(payload)
        stack.callback(opened.close)
        logs = stack.enter_context(log_folder(workers.log_dir))
        signals = stack.enter_context(StopSignals())
        job = _Job(limits, signals, logs)
        stack.callback(job.close)
        job.start(workers, opened)
        return job.wait()


class _Job:
    """Starts workers, waits for them, and ends them; nothing of it is left after ``close``."""

    def __init__(self, limits: JobTimeouts, signals: StopSignals, logs: Logs) -> None:
        self._limits = limits
        self._signals = signals
        self._logs = logs
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._started_s = time.monotonic()

    def start(self, workers: Workers, transport: Transport) -> None:
        """Starts every process."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for index, world in enumerate(workers.worlds):
            file = self._logs.path / f"rank-{world.rank}.log"
            env = _environment(world, workers)
            start = WorkerStart(index, world, env, output=file if index else None)
            worker = Worker(world.rank, index == 0, transport.start(start), file)
            self._workers.append(worker)
            self._selector.register(worker.handle.descriptor, selectors.EVENT_READ, worker)
        transport.all_started()

    def wait(self) -> Any:
        """The first rank's answer, once every worker has ended."""
        while True:
            self._listen()
            if self._signals.stop is not None:
                raise self._end_after_signal()
            if self._failures():
                raise self._end_after_failure()
            if all(worker.answer is not None for worker in self._workers):
                break
            self._check_start()
        self._until_ended(time.monotonic() + self._limits.grace_s)
        if self._signals.stop is not None:
            raise self._end_after_signal()
        for worker in self._workers:
            if not worker.ended:
                log.warning("rank %d finished, but did not end; it was killed", worker.rank)
        return self._answer()

    def close(self) -> None:
        """Kills what still runs."""
        for worker in self._workers:
            worker.handle.kill()
            worker.handle.close()
        self._selector.close()

    # -- watching --------------------------------------------------------------------------------

    def _listen(self) -> None:
        for key, _ in self._selector.select(POLL_S):
            worker: Worker = key.data
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

    def _end_after_failure(self) -> WorkerError | Interrupted:
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
            return self._make_interrupted(failures)
        return self._worker_error(cause, where=where)

    def _whereabouts(self) -> list[str]:
        """What the workers do that a failed one may have waited for, as far as is known."""
        silent = [w for w in self._workers if w.ready and not w.ended and w.failure is None]
        for worker in silent:
            worker.signal(signal.SIGUSR2)  # faulthandler writes down where it is
        stacks = self._collect_stacks([w for w in silent if w.answer is None])
        places = {rank: place_in(stack) for rank, stack in stacks.items()}
        ended = [f"rank {w.rank} has finished" for w in self._workers if w.answer is not None]
        return ended + [f"rank {rank} was at {place}" for rank, place in places.items() if place]

    def _collect_stacks(self, workers: Sequence[Worker]) -> dict[int, str]:
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
            worker.handle.kill()
            worker.ended = True
            worker.failure = failure

    def _end_after_signal(self) -> Interrupted:
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
        return self._make_interrupted(failures, killed=killed)

    def _make_interrupted(
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


def _environment(world: World, workers: Workers) -> dict[str, str]:
    """The variables of a worker: the parent's, its place for other libraries, its threads."""
    env = {k: v for k, v in workers.env.items() if not k.startswith("TORCHELASTIC_")}
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
