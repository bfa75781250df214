"""The contract of a launcher that submits: a run becomes a job of a scheduler, and goes on alone.

``plan`` says all that will be written and run, ``submit`` does it, and what came of it is asked by
the handle, which lies in the run's folder as ``job.json``. What a scheduler forgets, the run's own
``result.json`` knows.
"""

from __future__ import annotations

import abc
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torsh_trainer.errors import ConfigError, Interrupted, ResourceError
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.launchers.failures import root_cause
from torsh_trainer.launchers.job_folder import (
    BEGUN,
    CANCELLED,
    FOLDER,
    JOB,
    OUTPUT,
    PREEMPTED,
    JobHandle,
    JobStatus,
    read_failures,
)
from torsh_trainer.launchers.plan import JobRequest, LaunchPlan
from torsh_trainer.utils.files import disk_error, write_file

CLIENT_TIMEOUT_S = 120.0
_TAIL_BYTES = 1 << 16
UNREACHABLE_S = 300.0
"""So long ``wait`` goes on asking a scheduler that does not answer."""


@dataclass(frozen=True)
class SubmissionPlan(LaunchPlan):
    """A plan whose last command submits the job of ``run_dir``."""

    run_dir: Path = Path()

    @property
    def command(self) -> tuple[str, ...]:
        """What submits."""
        return self.commands[-1]


class SubmitLauncher(Launcher):
    """Hands a run to a scheduler; subclasses are frozen dataclasses of knobs.

    A subclass says ``plan``, ``read_id``, ``explain_refusal``, ``ask``, ``end`` and, where its jobs
    can save first, ``ask_to_save``. ``wait_for_end`` has the command wait for the job.
    ``elsewhere`` says that the job runs in an environment that is not this one (a container
    image), so that what is missing here may be there.
    """

    submits = True
    wait_for_end: bool = False
    client: ClassVar[str]
    """The program that submits, for messages."""

    poll_s: ClassVar[float] = 2.0

    @property
    def elsewhere(self) -> bool:
        """Whether the job's Python may hold other libraries than this one."""
        return False

    @abc.abstractmethod
    def plan(self, request: JobRequest) -> SubmissionPlan:
        """All that ``submit`` writes and runs. A pure function: it looks at nothing."""

    @abc.abstractmethod
    def read_id(self, output: str) -> str:
        """The job's id in what the submitting program has printed."""

    @abc.abstractmethod
    def explain_refusal(self, said: str) -> ConfigError | ResourceError:
        """What the scheduler refused, in a sentence that names the knob."""

    @abc.abstractmethod
    def ask(self, handle: JobHandle) -> JobStatus | None:
        """What the scheduler says; None where it does not know the job any more.

        Raises:
            ResourceError: it does not answer.
        """

    @abc.abstractmethod
    def end(self, handle: JobHandle) -> None:
        """Ends the job, or takes it out of the queue."""

    def ask_to_save(self, handle: JobHandle) -> None:
        """Has a running job save and leave, as SIGTERM to its ranks does."""

    def check_site(self) -> None:
        """Refuses knobs that this cluster cannot honour, before anything is written."""

    # -- Launcher --------------------------------------------------------------------------------

    def plan_launch(self, request: JobRequest, *, context: LaunchContext) -> LaunchPlan:
        """See ``Launcher.plan_launch``."""
        self.check_place(context)
        return self.plan(request)

    def launch(self, entry: Callable[..., Any], *args: Any, context: LaunchContext) -> Any:
        """Refuses: what is submitted is a configuration, and not a function of this process."""
        raise ConfigError(
            f"launcher={self.name} submits a run of the command line, and cannot start this one",
            fix="python -m torsh_trainer +recipe=NAME launcher="
            f"{self.name}; or leave launcher=local within a job's script",
        )

    def size(self, context: LaunchContext) -> int:
        """Not known before the job runs; one."""
        return 1

    def check_place(self, context: LaunchContext) -> None:
        """Refuses to submit from within a job, once for each of its processes."""
        found = context.found
        if found is not None and found.size > 1:
            raise ConfigError(
                f"launcher={self.name} submits a job, and {found.source} has started this command "
                f"{found.size} times",
                fix="submit from one process; within a job leave launcher=local",
            )

    # -- the life of a job -----------------------------------------------------------------------

    def submit(self, plan: SubmissionPlan) -> JobHandle:
        """Does what ``plan`` says, and writes job.json.

        Raises:
            ConfigError: the scheduler refuses what was asked of it; nothing is left.
            ResourceError: there is no scheduler, or the folder cannot be written.
        """
        self.check_site()
        with _taking_back(plan.run_dir / FOLDER):
            try:
                for file in plan.files:
                    file.path.parent.mkdir(parents=True, exist_ok=True)
                    write_file(file.path, file.content.encode())
                    file.path.chmod(file.mode)
                folder = plan.run_dir / FOLDER
                marks = (folder / CANCELLED, folder / PREEMPTED, *folder.glob(f"{BEGUN}*"))
                for mark in marks:
                    mark.unlink(missing_ok=True)
                (plan.run_dir / OUTPUT).parent.mkdir(exist_ok=True)
            except OSError as error:
                raise disk_error(error, "write", plan.run_dir, setting="hydra.run.dir") from error
            for command in plan.commands:
                done = run_client(command)
                if done.returncode:
                    raise self.explain_refusal(done.stderr.strip() or done.stdout.strip())
                if done.stderr.strip():
                    print(f"note: {done.stderr.strip()}", file=sys.stderr)
        host = socket.gethostname()
        handle = JobHandle(self.name, self.read_id(done.stdout), str(plan.run_dir), host)
        try:
            handle.write()
        except OSError as error:
            self.end(handle)
            raise disk_error(error, "write", plan.run_dir / JOB) from error
        return handle

    def status(self, handle: JobHandle) -> JobStatus:
        """Where the job is: the scheduler's word, and the run's own where that says less.

        Raises:
            ResourceError: the scheduler does not answer.
        """
        told, result = self.ask(handle), self.result(handle)
        if told is None:
            told = _tell_by_result(handle, result)
        if told.state != "failed":
            return told
        if (handle.home / FOLDER / CANCELLED).exists():
            return replace(told, state="cancelled", reason="")
        if (handle.home / FOLDER / PREEMPTED).exists():
            reason = "it has saved where it may; jobs resume goes on from there"
            return replace(told, state="preempted", reason=reason)
        return self._find_cause(handle, told, (result or {}).get("error"))

    def explain_output(self, text: str) -> str:
        """The line of a failed job's output that tells why, where the run itself does not."""
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        return lines[0].removeprefix("error: ") if lines else ""

    def _find_cause(
        self, handle: JobHandle, told: JobStatus, error: Mapping[str, Any] | None
    ) -> JobStatus:
        """``told`` with the cause: of the rank that failed first, if one has told, of its run, or
        of its output. A rank that was killed tells nothing, and ends the others by a signal."""
        failures = read_failures(handle.home)
        cause = root_cause(failures) if failures else None
        if cause is not None and not (cause.interrupted or cause.collateral):
            reason = f"{cause.sentence}; {cause.fix}" if cause.fix else cause.sentence
            return replace(told, reason=reason, exit_code=cause.cause_exit_code)
        if error and not failures and error.get("type") != Interrupted.__name__:
            return replace(told, reason=_in_words(error))
        reason = told.reason or self.explain_output(_read_tail(self.log_file(handle)))
        return replace(told, reason=reason or _in_words(error))

    def result(self, handle: JobHandle) -> dict[str, Any] | None:
        """result.json of this submission; None where it has left none."""
        path = handle.home / "result.json"
        try:
            if path.stat().st_mtime_ns < (handle.home / JOB).stat().st_mtime_ns:
                return None
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def log_file(self, handle: JobHandle, *, rank: int | None = None) -> Path:
        """Where a rank logs; None is what the whole job prints."""
        name = OUTPUT if rank is None else Path("logs", f"rank-{rank}.log")
        return handle.home / name

    def logs(
        self, handle: JobHandle, *, rank: int | None = None, follow: bool = False
    ) -> Iterator[str]:
        """What ``log_file`` holds, piece by piece; with ``follow`` until the job has ended.

        Raises:
            ConfigError: there is no such file, and none will come.
        """
        path, at = self.log_file(handle, rank=rank), 0
        while True:
            ended = not follow or self.status(handle).ended
            if path.exists():
                with path.open(encoding="utf-8", errors="replace") as file:
                    file.seek(at)
                    while piece := file.read(1 << 16):
                        yield piece
                    at = file.tell()
            elif ended:
                raise ConfigError(
                    f"there is no {path}", fix=f"the job is {self.status(handle)}", path=str(path)
                )
            if ended:
                return
            time.sleep(self.poll_s / 2)

    def cancel(self, handle: JobHandle, *, grace_s: float) -> JobStatus:
        """Ends the job: one that runs may save first, for ``grace_s`` seconds.

        Raises:
            ConfigError: it has ended already.
        """
        status = self.status(handle)
        if status.ended:
            raise ConfigError(
                f"job {handle.id} of {handle.run_dir} has ended: it is {status}",
                fix="there is nothing to cancel",
            )
        try:
            (handle.home / FOLDER / CANCELLED).touch()
        except OSError as error:
            raise disk_error(error, "write", handle.home / FOLDER / CANCELLED) from error
        try:
            if status.state == "running" and grace_s > 0:
                self.ask_to_save(handle)
                status = self.wait(handle, timeout_s=grace_s)
            if not status.ended:
                self.end(handle)
        except ResourceError:  # it goes on
            (handle.home / FOLDER / CANCELLED).unlink(missing_ok=True)
            raise
        return status if status.ended else self.wait(handle, timeout_s=CLIENT_TIMEOUT_S)

    def wait(self, handle: JobHandle, *, timeout_s: float | None = None) -> JobStatus:
        """The job's status once it has ended, or after ``timeout_s``.

        Raises:
            ResourceError: the scheduler has never answered, or not for minutes.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        patience = time.monotonic()
        while True:
            late = end is not None and time.monotonic() >= end
            try:
                status = self.status(handle)
                patience = time.monotonic() + UNREACHABLE_S
                if status.ended or late:
                    return status
            except ResourceError:
                if late or time.monotonic() >= patience:
                    raise
            left = self.poll_s if end is None else max(0.05, end - time.monotonic())
            time.sleep(min(self.poll_s, left))


def _read_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def run_client(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A scheduler's program, run to its end; its exit code is the caller's to read.

    Raises:
        ResourceError: it is not there, or does not end.
    """
    try:
        return subprocess.run(
            list(command),
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise ResourceError(
            f"there is no {command[0]} on the PATH of this machine",
            fix="submit from a login node of the cluster; launcher.dry_run=true shows the job here",
        ) from error
    except OSError as error:
        raise ResourceError(
            f"{command[0]} cannot be run: {error.strerror}", fix="look at PATH"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ResourceError(
            f"{command[0]} has not answered for {CLIENT_TIMEOUT_S:g} s",
            fix="try again; jobs status tells whether it was submitted after all",
        ) from error


def _tell_by_result(handle: JobHandle, result: dict[str, Any] | None) -> JobStatus:
    if result is None:
        return JobStatus("lost", "the scheduler does not know it, and it has left no result.json")
    error = result.get("error")
    if not error:
        return JobStatus("succeeded", exit_code=0)
    if error.get("type") == Interrupted.__name__:
        return JobStatus("failed", exit_code=128 + int(error.get("facts", {}).get("signal", 2)))
    return JobStatus("failed")


def _in_words(error: Mapping[str, Any] | None) -> str:
    if not error:
        return ""
    return "; ".join(filter(None, (str(error.get("message", "")), str(error.get("fix", "")))))


@contextlib.contextmanager
def _taking_back(folder: Path) -> Iterator[None]:
    """Around a submission: what it wrote goes again where it fails, unless it lay there before."""
    fresh = not folder.exists()
    try:
        yield
    except BaseException:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        raise
