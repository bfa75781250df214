"""What Slurm says of a job, and what it refuses, in our words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.job_folder import JobState, JobStatus
from torsh_trainer.launchers.submission import run_client

if TYPE_CHECKING:
    from torsh_trainer.launchers.slurm.launcher import SlurmLauncher

_STATES: dict[str, JobState] = {
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
        "queued",
    ),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"),
        "running",
    ),
    "COMPLETED": "succeeded",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "preempted",
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"), "failed"
    ),
}
"""Slurm's states and ours."""

_ENDS = {
    "TIMEOUT": "it reached its time limit; jobs resume goes on from its last checkpoint",
    "NODE_FAIL": "a node of it went down, and it was not to be requeued",
    "OUT_OF_MEMORY": "it used more memory than launcher.mem allows",
    "BOOT_FAIL": "its nodes could not be booted",
    "DEADLINE": "its deadline passed",
    "PREEMPTED": "a job of higher priority took its nodes",
}
_WAITS = {
    "Resources": "nodes are busy",
    "Priority": "other jobs come first",
    "BeginTime": "Slurm lets a job that is begun again wait for two minutes",
    "JobHeldUser": "it is held: scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "Dependency": "it waits for another job",
    "Reservation": "its reservation has not begun",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionConfig": "for ever: the partition has fewer nodes, or smaller ones, than it asks for",
    "PartitionNodeLimit": "for ever: more nodes than the partition gives to one job",
    "PartitionTimeLimit": "for ever: launcher.time is above the partition's limit",
    "BadConstraints": "for ever: no node is as launcher.constraint says",
    "ReqNodeNotAvail": "nodes that it asks for are down or reserved",
    "NodeDown": "a node that it asks for is down",
    "AccountNotAllowed": "for ever: launcher.account may not use the partition",
    "QOSNotAllowed": "for ever: launcher.qos may not use the partition",
    "InvalidAccount": "for ever: there is no such account",
    "InvalidQOS": "for ever: there is no such qos",
    "launch_failed_requeued_held": "it could not be started and is held; scontrol release lets it "
    "go",
}
_REFUSALS = (
    (r"invalid partition", "partition", "sinfo lists them"),
    (r"invalid account|account/partition", "account", "sacctmgr show associations user=$USER"),
    (r"invalid qos", "qos", "sacctmgr show qos lists them"),
    (r"invalid feature|feature specification", "constraint", "sinfo -o '%n %f' lists them"),
    (r"time limit", "time", "sinfo -o '%P %l' shows the limits"),
    (r"node count", "nodes", "sinfo shows how many there are"),
    (r"memory specification", "mem", "sinfo -o '%n %m' shows what nodes have"),
    (r"generic resource|gres", "gpus_per_node", "sinfo -o '%n %G' shows what nodes have"),
    (r"more processors|cpu count", "cpus_per_task", "sinfo -o '%n %c' shows what nodes have"),
)
_CONTROLLER = re.compile(
    r"unable to contact|configuration source|connection|communication|socket timed out|slurmctld",
    re.I,
)
_GONE = re.compile(r"invalid job id", re.I)
_START = re.compile(r"error: execve\(\): (.*): (.*)$", re.MULTILINE)
_TASK = re.compile(
    r"^srun: error: (\S+): tasks? ([\d,-]+): (Killed|Out Of Memory|Aborted|Segmentation fault|"
    r"Bus error|Exited with exit code (?!143|138)\d+)",
    re.MULTILINE,
)
_SIGNAL_OF_NO_OUTPUT = 53


def ask(number: str) -> JobStatus | None:
    """Where job ``number`` is: by scontrol while Slurm has it in mind, then by sacct.

    Raises:
        ResourceError: the controller does not answer.
    """
    done = run_client(("scontrol", "show", "job", number, "--oneliner"))
    if done.returncode == 0 and "JobState=" in done.stdout:
        return read_job(done.stdout)
    if not _GONE.search(done.stderr):
        raise ResourceError(
            f"Slurm does not answer: {_one_line(done.stderr)}",
            fix="try again; squeue on a login node tells the same",
        )
    words = ("sacct", "--allocations", "--noheader", "--parsable2", "--format=State,ExitCode")
    done = run_client((*words, f"--jobs={number}"))
    return read_accounting(done.stdout) if done.returncode == 0 else None


def read_job(line: str) -> JobStatus:
    """What ``scontrol show job`` says, on one line."""
    # The name of the job, which comes before, holds no spaces: see SlurmLauncher.
    state = _field(line, "JobState")
    restarts = int(_field(line, "Restarts") or 0)
    return _make_status(state, _field(line, "ExitCode"), _field(line, "Reason"), restarts)


def read_accounting(text: str) -> JobStatus | None:
    """What ``sacct`` says (``State|ExitCode``); its last line, None for no line."""
    lines = [line for line in text.splitlines() if "|" in line]
    if not lines:
        return None
    state, code = lines[-1].split("|")[:2]
    return _make_status(state.split()[0], code, "", 0)


def explain_refusal(said: str, launcher: SlurmLauncher) -> ConfigError | ResourceError:
    """What sbatch refused, in a sentence that names the knob."""
    words = _one_line(re.sub(r"sbatch: (error|fatal): (Batch job submission failed: )?", "", said))
    if _CONTROLLER.search(words):
        return ResourceError(
            f"sbatch does not reach Slurm: {words}", fix="submit from a login node of the cluster"
        )
    if "policy" in words:
        return ConfigError(
            f"a limit of your account or qos refuses the job: {words}",
            fix="ask for less (launcher.nodes, launcher.time), or wait until others have ended; "
            "sacctmgr show associations user=$USER shows limits",
        )
    for pattern, knob, fix in _REFUSALS:
        if re.search(pattern, words, re.I):
            value = getattr(launcher, knob)
            return ConfigError(f"launcher.{knob}={value}: Slurm says {words}", fix=fix)
    return ConfigError(
        f"Slurm refuses the job: {words}",
        fix="look at the knobs of the launcher; launcher.dry_run=true shows the command",
    )


def explain_tasks(text: str) -> str:
    """What srun says of the task that ended first in the output of a job; empty for nothing."""
    found = _START.search(text)
    if found is not None:
        return f"{found[1]} cannot be started: {found[2]} (launcher.python)"
    found = _TASK.search(text)
    if found is None:
        return ""
    host, task, how = found.groups()
    return f"rank {task} on {host}: {how}"


def _make_status(state: str, code: str, reason: str, restarts: int) -> JobStatus:
    ours = _STATES.get(state, "lost")
    if ours == "queued":
        return JobStatus("queued", _explain_waiting(state, reason), restarts=restarts)
    if ours == "running":
        return JobStatus("running", "" if state == "RUNNING" else state.lower(), restarts=restarts)
    number, _, signal = code.partition(":")
    exit_code = int(number or 0) or (128 + int(signal) if signal not in ("", "0") else 0)
    cause = _ENDS.get(state, "")
    if ours == "failed" and not cause:
        cause = _explain_failure(int(signal or 0), reason)
    if ours == "lost":
        cause = f"Slurm calls its state {state}, which is not known here"
    if ours == "failed" and not exit_code:
        exit_code = 1
    return JobStatus(ours, cause, exit_code, restarts)


def _explain_waiting(state: str, reason: str) -> str:
    if state == "CONFIGURING":
        return "its nodes are being made ready"
    words = _WAITS.get(reason)
    if words is None and re.match(r"(QOS|Assoc|MaxJobs|Max)", reason):
        words = "a limit of your account or qos is reached"
    return f"{words} ({reason})" if words else reason if reason != "None" else ""


def _explain_failure(signal: int, reason: str) -> str:
    if signal == _SIGNAL_OF_NO_OUTPUT:
        return (
            "the node could not open its output (launcher.output, else logs/job.out of the run's "
            "folder): put it on a disk that the nodes share"
        )
    return "" if reason in ("None", "NonZeroExitCode", "") else reason


def _field(line: str, name: str) -> str:
    found = re.search(rf" {name}=(\S+)", line)
    return "" if found is None else found[1]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
