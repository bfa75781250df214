"""The launcher of PBS Professional and OpenPBS: a run becomes a job of qsub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.batch.mpirun import MpirunBatch
from torsh_trainer.launchers.job_folder import JobHandle, JobState, JobStatus
from torsh_trainer.launchers.plan import JobRequest
from torsh_trainer.launchers.submission import SubmissionPlan, run_client

_STATES: dict[str, JobState] = {
    **dict.fromkeys(("Q", "H", "W", "T", "M"), "queued"),
    **dict.fromkeys(("B", "R", "E", "S", "U"), "running"),
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNITS = {"K": "kb", "M": "mb", "G": "gb", "T": "tb"}
_WALLTIME = -29
_SIGNALLED = 256
"""Exit_status: the number of a signal is added to it, and limits have numbers below zero."""


@dataclass(frozen=True)
class PbsLauncher(MpirunBatch):
    """Submits the run with qsub; mpirun starts its processes. See ``MpirunBatch``.

    ``variables`` are names of variables that the job gets as they are here. PBS passes on none, and
    whoever may see the job with ``qstat -f`` sees the values of these.

    Written after the manuals of PBS Professional; Torque, which has other words, is not meant.
    """

    name = "pbs"
    client = "qsub"
    refusals: ClassVar[Mapping[str, str]] = {
        r"queue": "queue",
        r"project|account": "project",
        r"walltime": "time",
    }

    variables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for variable in self.variables:
            if _VARIABLE.fullmatch(variable) is None:
                raise ConfigError(
                    f"launcher.variables: {variable!r} is no name of a variable",
                    fix="name variables of this shell, without values",
                )

    def plan(self, request: JobRequest) -> SubmissionPlan:
        script = self.plan_script(request, address='$(head -n 1 "$PBS_NODEFILE")')
        tasks = self.tasks_per_node
        chunk = f"select={self.nodes}:ncpus={tasks * (self.cpus_per_task or 1)}:mpiprocs={tasks}"
        if self.gpus_per_node is not None:
            chunk += f":ngpus={self.gpus_per_node}"
        if self.mem is not None:
            unit = self.mem[-1].upper()
            number = self.mem[:-1] if unit in _UNITS else self.mem
            chunk += f":mem={number}{_UNITS.get(unit, 'mb')}"
        words = ["qsub", "-N", self.plan_name(request), "-j", "oe", "-o", "/dev/null", "-l", chunk]
        if self.nodes > 1:
            words += ["-l", "place=scatter"]
        if self.time is not None:
            words += ["-l", f"walltime={self.time}"]
        for option, value in (("-q", self.queue), ("-P", self.project)):
            words += [] if value is None else [option, value]
        words += ["-r", "y" if self.requeue else "n"]
        if self.variables:
            words += ["-v", ",".join(self.variables)]
        return self.make_plan(request, *words, str(script.path), script=script)

    def read_id(self, output: str) -> str:
        return output.strip().splitlines()[-1].strip()

    def end(self, handle: JobHandle) -> None:
        self.signal(handle, "qdel")

    def ask_to_save(self, handle: JobHandle) -> None:
        self.signal(handle, "qsig", "-s", "SIGTERM")

    def ask(self, handle: JobHandle) -> JobStatus | None:
        done = run_client(("qstat", "-x", "-f", "-F", "json", handle.id))
        if done.returncode:
            if re.search(r"unknown job|history|has finished", done.stderr, re.I):
                return None
            raise ResourceError(
                f"PBS does not answer: {' '.join(done.stderr.split())}", fix="try again"
            )
        try:
            (job,) = json.loads(done.stdout)["Jobs"].values()
        except (ValueError, KeyError) as error:
            raise ResourceError(
                "qstat has answered in another form than -F json has",
                fix="qstat -x -f tells how the job is",
            ) from error
        return read_pbs_job(job)


def read_pbs_job(job: dict[str, Any]) -> JobStatus:
    """What ``qstat -x -f -F json`` says of one job."""
    state = str(job.get("job_state", ""))
    restarts = max(0, int(job.get("run_count", 1)) - 1)
    if state in _STATES:
        reason = str(job.get("comment", "")) if _STATES[state] == "queued" else ""
        return JobStatus(_STATES[state], reason, restarts=restarts)
    code = int(job.get("Exit_status", 1))
    if code == 0:
        return JobStatus("succeeded", exit_code=0, restarts=restarts)
    if code == _WALLTIME:
        return JobStatus("failed", "it reached its time limit (launcher.time)", 1, restarts)
    if code < 0:
        return JobStatus("failed", f"PBS has ended it: {job.get('comment', code)}", 1, restarts)
    if code > _SIGNALLED:
        code = 128 + code - _SIGNALLED
    return JobStatus("failed", "", code, restarts)
