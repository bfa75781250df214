"""The launcher of LSF: a run becomes a job of bsub."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torsh_trainer.errors import ResourceError
from torsh_trainer.launchers.batch.mpirun import MpirunBatch
from torsh_trainer.launchers.job_folder import JobHandle, JobState, JobStatus
from torsh_trainer.launchers.plan import JobRequest
from torsh_trainer.launchers.submission import SubmissionPlan, run_client

_STATES: dict[str, JobState] = {
    **dict.fromkeys(("PEND", "PSUSP", "WAIT"), "queued"),
    **dict.fromkeys(("RUN", "USUSP", "SSUSP", "PROV"), "running"),
    "DONE": "succeeded",
    "EXIT": "failed",
}
_FIELDS = "jobid stat exit_code exit_reason pend_reason"
_ID = re.compile(r"Job <(\d+)>")


@dataclass(frozen=True)
class LsfLauncher(MpirunBatch):
    """Submits the run with bsub; mpirun starts its processes. See ``MpirunBatch``.

    Written after LSF's manuals. ``mem`` is of each node and becomes LSF's limit of a process.
    """

    name = "lsf"
    client = "bsub"
    refusals: ClassVar[Mapping[str, str]] = {
        r"queue": "queue",
        r"project": "project",
        r"run ?limit|run time": "time",
    }

    def plan(self, request: JobRequest) -> SubmissionPlan:
        # The hosts and their slots in one line: host slots host slots ...
        script = self.plan_script(request, address="${LSB_MCPU_HOSTS%% *}")
        tasks = self.tasks_per_node
        words = ["bsub", "-J", self.plan_name(request), "-o", "/dev/null"]
        words += ["-n", str(self.nodes * tasks), "-R", f"span[ptile={tasks}]"]
        if self.cpus_per_task is not None:
            words += ["-R", f"affinity[core({self.cpus_per_task})]"]
        if self.gpus_per_node is not None:
            words += ["-gpu", f"num={self.gpus_per_node}"]
        if self.mem is not None:
            words += ["-R", f"rusage[mem={self.mem}]"]
        if self.time is not None:
            hours, minutes, _ = self.time.split(":")
            words += ["-W", f"{hours}:{minutes}"]
        for option, value in (("-q", self.queue), ("-P", self.project)):
            words += [] if value is None else [option, value]
        words.append("-r" if self.requeue else "-rn")
        # What follows the options is read by a shell once more.
        return self.make_plan(request, *words, shlex.quote(str(script.path)), script=script)

    def read_id(self, output: str) -> str:
        found = _ID.search(output)
        if found is None:
            raise ResourceError(
                f"bsub has submitted the job and told no number: {output.strip()[:200]!r}",
                fix="bjobs shows it",
            )
        return found[1]

    def end(self, handle: JobHandle) -> None:
        self.signal(handle, "bkill")

    def ask_to_save(self, handle: JobHandle) -> None:
        self.signal(handle, "bkill", "-s", "TERM")

    def ask(self, handle: JobHandle) -> JobStatus | None:
        done = run_client(("bjobs", "-json", "-o", _FIELDS, handle.id))
        if "is not found" in done.stdout + done.stderr:
            return None
        try:
            (record,) = json.loads(done.stdout)["RECORDS"]
        except (ValueError, KeyError) as error:
            said = " ".join((done.stderr or done.stdout).split())[:200]
            raise ResourceError(f"LSF does not answer: {said}", fix="try again") from error
        return read_lsf_record(record)


def read_lsf_record(record: dict[str, Any]) -> JobStatus | None:
    """What ``bjobs -json`` says of one job; None for what it does not know."""
    if "ERROR" in record:
        return None
    state = _STATES.get(str(record["STAT"]), "lost")
    if state == "queued":
        return JobStatus(state, " ".join(str(record.get("PEND_REASON", "")).split()))
    if state == "running":
        return JobStatus(state)
    if state == "succeeded":
        return JobStatus(state, exit_code=0)
    if state == "lost":
        return JobStatus(state, f"LSF calls its state {record['STAT']}")
    reason = str(record.get("EXIT_REASON", ""))
    return JobStatus(state, reason, int(record.get("EXIT_CODE") or 1))
