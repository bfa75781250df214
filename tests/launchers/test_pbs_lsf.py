"""launcher=pbs and launcher=lsf, on stand-ins for their programs: what is written is run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.launchers.conftest import losses
from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.job_folder import JobStatus
from torsh_trainer.launchers.lsf import LsfLauncher, read_lsf_record
from torsh_trainer.launchers.pbs import PbsLauncher, read_pbs_job
from torsh_trainer.launchers.plan import JobRequest
from torsh_trainer.testing import SubmitLauncherContract

PROGRAMS = ("qsub", "qstat", "qdel", "qsig", "bsub", "bjobs", "bkill", "mpirun")
REQUEST = JobRequest(Path("/runs/it's 1"), Path("/home/me"), ("-m", "torsh_trainer"), "python")


@pytest.fixture
def stub_queue(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs on the PATH."""
    folder = tmp_path_factory.mktemp("queue")
    for name in PROGRAMS:
        program = folder / name
        program.write_text(
            f"#!{sys.executable}\n" + Path(__file__).with_name("stub_queue.py").read_text()
        )
        program.chmod(0o755)
    monkeypatch.setenv("STUB_QUEUE", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for launcher in (PbsLauncher, LsfLauncher):
        monkeypatch.setattr(launcher, "poll_s", 0.2)


@pytest.mark.usefixtures("stub_queue")
class TestPbs(SubmitLauncherContract):
    launcher = PbsLauncher()


@pytest.mark.exhaustive  # the stand-in is the same
@pytest.mark.usefixtures("stub_queue")
class TestLsf(SubmitLauncherContract):
    launcher = LsfLauncher()


@pytest.mark.usefixtures("stub_queue")
@pytest.mark.parametrize("launcher", ["pbs", pytest.param("lsf", marks=pytest.mark.exhaustive)])
def test_two_processes_train_as_local_ones_do(launcher, door, home, local_losses, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    passed = [name for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ]
    words = ["+recipe=quick.yaml", "strategy=ddp", f"launcher={launcher}", "hydra.run.dir=run"]
    if launcher == "pbs":
        words.append(f"launcher.variables=[{','.join(passed)}]")
    assert door(*words, "launcher.ntasks_per_node=2").code == 0
    assert door("jobs", "wait", "run").code == 0, (home / "run/logs/job.out").read_text()
    assert losses(home / "run") == local_losses


@pytest.mark.usefixtures("stub_queue")
@pytest.mark.parametrize("launcher", ["pbs", "lsf"])
def test_a_queue_that_is_not_there_is_told_by_its_knob(launcher, door, home):
    answer = door("+recipe=quick.yaml", f"launcher={launcher}", "launcher.queue=nosuch")
    assert answer.code == 2
    assert "launcher.queue=nosuch: " in answer.err
    assert not (home / "runs").exists()


def test_every_knob_reaches_qsub():
    launcher = PbsLauncher(
        nodes=2,
        gpus_per_node=4,
        cpus_per_task=8,
        mem="32G",
        time="12:00:00",
        queue="gpu",
        project="mine",
        requeue=False,
        mpirun=("mpiexec", "--hostfile", "a b"),
        variables=("HF_TOKEN",),
    )
    plan = launcher.plan(REQUEST)
    assert plan.command == (
        *("qsub", "-N", "runs_it_s_1", "-j", "oe", "-o", "/dev/null"),
        *("-l", "select=2:ncpus=32:mpiprocs=4:ngpus=4:mem=32gb", "-l", "place=scatter"),
        *("-l", "walltime=12:00:00", "-q", "gpu", "-P", "mine", "-r", "n", "-v", "HF_TOKEN"),
        "/runs/it's 1/job/submit.sh",
    )
    assert "first=$(head -n 1 \"$PBS_NODEFILE\")\nmpiexec --hostfile 'a b' -n 8 \\\n" in (
        plan.files[-1].content
    )


def test_every_knob_reaches_bsub():
    launcher = LsfLauncher(
        nodes=2,
        ntasks_per_node=4,
        gpus_per_node=4,
        cpus_per_task=8,
        mem="32G",
        time="12:30:00",
        queue="gpu",
        project="mine",
    )
    assert launcher.plan(REQUEST).command == (
        *("bsub", "-J", "runs_it_s_1", "-o", "/dev/null", "-n", "8", "-R", "span[ptile=4]"),
        *("-R", "affinity[core(8)]", "-gpu", "num=4", "-R", "rusage[mem=32G]", "-W", "12:30"),
        *("-q", "gpu", "-P", "mine", "-r", "'/runs/it'\"'\"'s 1/job/submit.sh'"),
    )


@pytest.mark.parametrize("launcher", [PbsLauncher, LsfLauncher])
@pytest.mark.parametrize(
    "knobs",
    [{"nodes": 0}, {"time": "12"}, {"mem": "much"}, {"queue": ""}, {"mpirun": ()}],
    ids=str,
)
def test_a_knob_that_makes_no_sense_is_refused(launcher, knobs):
    with pytest.raises(ConfigError) as caught:
        launcher(**knobs)
    assert f"launcher.{next(iter(knobs))}" in str(caught.value)


@pytest.mark.parametrize(
    ("job", "status"),
    [
        ({"job_state": "Q", "comment": "no nodes"}, JobStatus("queued", "no nodes")),
        ({"job_state": "R", "run_count": 3}, JobStatus("running", restarts=2)),
        ({"job_state": "F", "Exit_status": 271}, JobStatus("failed", exit_code=143)),
        ({"job_state": "F", "Exit_status": 3}, JobStatus("failed", exit_code=3)),
        (
            {"job_state": "F", "Exit_status": -29},
            JobStatus("failed", "it reached its time limit (launcher.time)", 1),
        ),
    ],
)
def test_states_of_pbs_are_read_as_its_manual_has_them(job, status):
    assert read_pbs_job(job) == status


def test_states_of_lsf_are_read_as_its_manual_has_them():
    waiting = {"STAT": "PEND", "PEND_REASON": "New job is waiting;"}
    assert read_lsf_record(waiting) == JobStatus("queued", "New job is waiting;")
    ended = {"STAT": "EXIT", "EXIT_CODE": "140", "EXIT_REASON": "TERM_RUNLIMIT"}
    assert read_lsf_record(ended) == JobStatus("failed", "TERM_RUNLIMIT", 140)
    odd = read_lsf_record({"STAT": "UNKWN"})
    assert odd is not None
    assert odd.state == "lost"
