"""Knobs of launcher=slurm that are refused by name, and what Slurm says in our words."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.job_folder import JobStatus
from torsh_trainer.launchers.plan import JobRequest
from torsh_trainer.launchers.slurm import told
from torsh_trainer.launchers.slurm.launcher import SlurmLauncher

REFUSED = {
    "nodes": ({"nodes": 0}, "launcher.nodes=0 is no number of nodes"),
    "tasks": ({"ntasks_per_node": "many"}, "launcher.ntasks_per_node=many is no number"),
    "gpus": ({"gpus_per_node": "a100"}, "neither a number nor TYPE:NUMBER"),
    "memory": ({"mem": "32 GB"}, "launcher.mem=32 GB is no amount of memory"),
    "YAML's seconds": ({"time": 43200}, "YAML reads 12:00:00 as 43200"),
    "bare minutes": ({"time": "30"}, "launcher.time=30 has no unit"),
    "short": ({"time": "3:00"}, "leaves nothing to train before launcher.signal=USR1@120"),
    "to the script": ({"signal": "B:USR1@60"}, "launcher.signal=B:USR1@60 cannot be honoured"),
    "deaf": ({"signal": "USR2@60"}, "launcher.signal=USR2@60 cannot be honoured"),
    "line": ({"partition": "a\nb"}, "holds what cannot be printed"),
    "pattern": ({"output": "log-%x.out"}, "only %j, the job's number, is known"),
    "mounts": ({"container_mounts": ("/a:/b",)}, "has nothing to mount into"),
    "comma": ({"container_image": "i", "container_mounts": ("a,b",)}, "SOURCE:TARGET"),
    "short option": ({"sbatch_options": ("-N4",)}, "'-N4' is no long option"),
    "word": ({"sbatch_options": ("rm",)}, "'rm' is no long option"),
    "owned": ({"sbatch_options": ("--nodes=4",)}, "--nodes=4 is not yours to set here; set lau"),
    "abbreviated": ({"sbatch_options": ("--parti=x",)}, "set launcher.partition"),
    "array": ({"sbatch_options": ("--array=1-3",)}, "each job of a sweep is a submission"),
    "hetero": ({"sbatch_options": (":",)}, "heterogeneous jobs (:) are not possible"),
    "hetero group": ({"srun_options": ("--het-group=0",)}, "a heterogeneous job has groups"),
    "pack group": ({"srun_options": ("--pack-group=0",)}, "a heterogeneous job has groups"),
    "srun": ({"srun_options": ("--ntasks=3",)}, "set launcher.nodes and launcher.ntasks_per_node"),
}


FAILED = "sbatch: error: Batch job submission failed:"


def request_in(folder: str) -> JobRequest:
    return JobRequest(Path(folder), Path("/home/me"), ("-m", "torsh_trainer"), "python")


@pytest.mark.parametrize("what", REFUSED)
def test_a_knob_that_makes_no_sense_is_refused_by_name(what):
    knobs, sentence = REFUSED[what]
    with pytest.raises(ConfigError) as caught:
        SlurmLauncher(**knobs)
    assert sentence in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("time", ["12:00:00", "30:00", "1-0", "2-12:30", "2-12:30:15", "UNLIMITED"])
def test_times_as_slurm_writes_them_are_taken(time):
    assert SlurmLauncher(time=time).time == time


def test_a_folder_with_a_backslash_is_refused_before_slurm_drops_it():
    with pytest.raises(ConfigError, match="backslash"):
        SlurmLauncher().plan(request_in("/home/me/a\\b"))


def test_every_knob_reaches_the_command():
    launcher = SlurmLauncher(
        nodes=3,
        gpus_per_node="a100:4",
        cpus_per_task=8,
        mem="32G",
        time="2-12",
        partition="gpu",
        account="mine",
        qos="high",
        constraint="a&b",
        job_name="a name",
        output="/logs/%j",
        signal="USR1@60",
        requeue=False,
        container_image="docker://x",
        container_mounts=("/a:/b", "/c:/d"),
        sbatch_options=("--exclusive", "--mail-type=END"),
        srun_options=("--mpi=none",),
        python="/opt/python",
    )
    plan = launcher.plan(request_in("/runs/100%"))
    assert plan.command == (
        *("sbatch", "--parsable", "--job-name=a_name", "--chdir=/runs/100%", "--output=/logs/%j"),
        *("--open-mode=append", "--no-requeue", "--nodes=3", "--ntasks=12", "--ntasks-per-node=4"),
        *("--cpus-per-task=8", "--gpus-per-node=a100:4", "--mem=32G", "--time=2-12"),
        *("--partition=gpu", "--account=mine", "--qos=high", "--constraint=a&b"),
        *("--signal=USR1@60", "--exclusive", "--mail-type=END", "/runs/100%/job/submit.sh"),
    )
    script = plan.files[-1].content
    assert "scontrol requeue" not in script
    assert (
        "srun --nodes=3 --ntasks=12 --ntasks-per-node=4 --cpus-per-task=8 --kill-on-bad-exit=1 "
        "--container-image=docker://x --container-workdir=/home/me "
        "--container-mounts=/a:/b,/c:/d --mpi=none \\\n    /opt/python -m torsh_trainer"
    ) in script
    assert (
        "--output=/runs/100%%/logs/job.out"
        in SlurmLauncher().plan(request_in("/runs/100%")).command
    )


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("COMPLETED|0:0\n", JobStatus("succeeded", exit_code=0)),
        ("FAILED|3:0\n", JobStatus("failed", exit_code=3)),
        ("CANCELLED by 1000|0:15\n", JobStatus("cancelled", exit_code=143)),
        ("PREEMPTED|0:15\n", JobStatus("preempted", told._ENDS["PREEMPTED"], 143)),
        ("TIMEOUT|0:0\n", JobStatus("failed", told._ENDS["TIMEOUT"], 1)),
        ("OUT_OF_MEMORY|0:125\n", JobStatus("failed", told._ENDS["OUT_OF_MEMORY"], 253)),
        ("PENDING|0:0\n", JobStatus("queued")),
        ("RUNNING|0:0\n", JobStatus("running")),
        ("", None),
    ],
)
def test_states_of_accounting_as_sacct_prints_them(text, status):
    assert told.read_accounting(text) == status


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "slurmstepd: error: execve(): /no/such/python: No such file or directory",
            "/no/such/python cannot be started: No such file or directory (launcher.python)",
        ),
        ("srun: error: lab2: task 3: Killed", "rank 3 on lab2: Killed"),
        ("srun: error: lab2: task 3: Out Of Memory", "rank 3 on lab2: Out Of Memory"),
        ("srun: error: lab2: tasks 3-4: Exited with exit code 143", ""),
    ],
)
def test_the_output_tells_what_ended_first(line, cause):
    after = "srun: error: lab1: task 0: Exited with exit code 9"
    told_of = told.explain_tasks(f"step 1\n{line}\n{after if cause else ''}\n")
    assert told_of == cause


def test_a_state_that_nobody_knows_is_told_as_it_is():
    status = told.read_job("JobId=1 JobName=a JobState=NEW_ONE Reason=None ExitCode=0:0")
    assert status.state == "lost"
    assert "NEW_ONE" in status.reason


@pytest.mark.parametrize(
    ("said", "kind", "sentence"),
    [
        (
            f"{FAILED} Invalid account or account/partition combination specified",
            ConfigError,
            "launcher.account=mine: Slurm says Invalid account",
        ),
        (
            f"{FAILED} Requested time limit is invalid (missing or exceeds some limit)",
            ConfigError,
            "launcher.time=1-0: Slurm says",
        ),
        (
            f"{FAILED} Invalid qos specification",
            ConfigError,
            "launcher.qos=None",
        ),
        (
            f"{FAILED} Unable to contact slurm controller (connect failure)",
            ResourceError,
            "sbatch does not reach Slurm",
        ),
        (
            f"{FAILED} Job violates accounting/QOS policy (user's size and/or time limits)",
            ConfigError,
            "a limit of your account or qos refuses the job",
        ),
        ("sbatch: error: something new", ConfigError, "Slurm refuses the job: something new"),
    ],
)
def test_what_sbatch_refuses_names_the_knob(said, kind, sentence):
    error = told.explain_refusal(said, SlurmLauncher(account="mine", time="1-0"))
    assert isinstance(error, kind)
    assert sentence in str(error)
    assert error.fix
