"""Runs on a real Slurm: trained on two nodes, stopped, begun again, lost, and refused."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.door import Door
from tests.launchers.conftest import PATIENCE_S, SlurmLab, losses
from torsh_trainer.launchers.job_folder import JobHandle

TWO = ("+recipe=quick.yaml", "strategy=ddp", "launcher=slurm", "launcher.nodes=2")
HELD = "+callbacks.held={_target_: held.Held}"


def number(run_dir: Path) -> str:
    return JobHandle.read(run_dir).id


def wait_for(path: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end, f"there is no {path}"
        time.sleep(0.05)


def only(text: str) -> dict:
    (row,) = json.loads(text)["jobs"]
    return row


def test_two_nodes_train_as_two_local_processes_do_whatever_names_hold(
    slurm, door, home, local_losses
):
    name = 'it\'s $HOME "%j" `id`; a'
    folder = home / "runs" / name
    values = ['a"b', "it's $HOME", "x\ny", "\\${vars.none}", "$(id)", "1e-3", "", "\x1b[2J"]
    recipe = yaml.safe_load((home / "quick.yaml").read_text())
    (home / "quick.yaml").write_text(json.dumps({**recipe, "vars": {"mine": values}}))
    answer = door(*TWO, "hydra.run.dir='runs/" + name.replace("'", "\\'") + "'")
    assert answer.code == 0, answer.err
    assert answer.out == f"submitted: slurm job {number(folder)}, {folder}\n"
    assert door("jobs", "wait", "runs").code == 0, (folder / "logs" / "job.out").read_text()
    assert losses(folder) == local_losses
    row = only(door("jobs", "status", str(folder), "--json").out)
    assert (row["state"], row["exit_code"], row["run_dir"]) == ("succeeded", 0, str(folder))
    assert only(door("jobs", "list", "--json").out) == row
    assert "succeeded" in door("jobs", "list").out
    config = yaml.safe_load((folder / "config.yaml").read_text())
    values[3] = "${vars.none}"  # the backslash was OmegaConf's
    assert config["vars"]["mine"] == values
    assert json.loads((folder / "result.json").read_text())["world_size"] == 2
    slurm.wait_until(number(folder), "NumNodes=2")


def test_a_dry_run_shows_what_a_submission_uses_byte_for_byte(slurm, home):
    words = (*TWO, "launcher.time='10:00'", "vars.x=1", "hydra.run.dir=here")

    def run(*more: str) -> str:
        script = "import sys; from torsh_trainer.__main__ import main; code = main(sys.argv[1:]); "
        script += "assert 'launcher.dry_run=true' not in sys.argv or 'torch' not in sys.modules; "
        command = [sys.executable, "-c", script + "sys.exit(code)", *words, *more]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = sorted(home.iterdir())
    shown = run("launcher.dry_run=true")
    assert sorted(home.iterdir()) == before
    assert slurm.calls() == []
    run()
    submitted = [call for call in slurm.calls() if call[0] == "sbatch"]
    rest = shown
    for file in (home / "here" / "job" / name for name in ("run.yaml", "submit.sh")):
        content = file.read_text()
        part = f"--- {file} ({len(content.encode())} bytes)\n{content}"
        assert part in rest
        rest = rest.replace(part, "")
    command = f"--- command\n{subprocess.list2cmdline(submitted[0])}\n"
    assert rest == f"--- {home}/here/.torsh_run (0 bytes)\n{command}"


def test_a_preempted_run_saves_waits_again_and_goes_on_bit_for_bit(slurm, door, home, local_losses):
    folder = home / "run"
    assert door(*TWO, HELD, "launcher.cpus_per_task=2", "hydra.run.dir=run").code == 0
    wait_for(home / "held")
    first = number(folder)
    high = slurm.run("sbatch", "--parsable", "-phigh", "-N1", "-c2", "-o/dev/null", "--wrap=true")
    slurm.wait_until(first, "PreemptTime=2")
    (home / "go").touch()
    slurm.wait_until(first, "Restarts=1")
    slurm.wait_until(high.strip(), "JobState=COMPLETED")
    row = only(door("jobs", "status", "run", "--json").out)
    assert (row["state"], row["restarts"]) == ("queued", 1)
    assert "(BeginTime)" in row["reason"]
    assert door("jobs", "wait", "run").code == 0, (folder / "logs" / "job.out").read_text()
    assert "resumed" in (folder / "logs" / "rank-0.log").read_text()
    assert losses(folder) == local_losses


def test_a_cancelled_run_saves_and_is_resumed_bit_for_bit(slurm, door, home, local_losses):
    folder = home / "run"
    assert door(*TWO, HELD, "hydra.run.dir=run").code == 0
    wait_for(home / "held")
    cancelling = subprocess.Popen(
        [sys.executable, "-m", "torsh_trainer", "jobs", "cancel", "run", "--grace", "200"]
    )
    wait_for(folder / "job" / "cancelled")
    time.sleep(1)  # the signal is on its way; a save that comes before it would only save later
    (home / "go").touch()
    assert cancelling.wait() == 0
    assert only(door("jobs", "status", "run", "--json").out)["state"] == "cancelled"
    assert len(list((folder / "checkpoints").iterdir())) == 1
    assert door("jobs", "wait", "run").code == 143
    assert door("jobs", "resume", "run").code == 0
    assert door("jobs", "wait", "run").code == 0, (folder / "logs" / "job.out").read_text()
    assert losses(folder) == local_losses
    again = door("jobs", "resume", "run")
    assert again.code == 2
    assert "is succeeded" in again.err


def test_a_rank_that_is_killed_fails_the_job_and_nothing_is_requeued(slurm, door, home):
    (home / "killed.py").write_text(
        "import os, signal\nfrom torsh_trainer import Callback\n\n\n"
        "class Killed(Callback):\n"
        "    def on_step(self, report):\n"
        "        if os.environ['SLURM_PROCID'] == '1' and report.step == 3:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = "+callbacks.killed={_target_: killed.Killed}"
    assert door(*TWO, killed, "hydra.run.dir=run").code == 0
    answer = door("jobs", "wait", "run")
    assert answer.code not in (0, 2)
    assert "is failed" in answer.out
    assert "rank 1 on lab2: Killed" in answer.out
    assert "restarted" not in answer.out
    assert "JobState=FAILED" in slurm.job(number(home / "run"))


def test_the_rank_that_fails_first_is_told_with_its_words_and_exit_code(slurm, door, home):
    (home / "refusing.py").write_text(
        "import os\nfrom torsh_trainer import Callback\n"
        "from torsh_trainer.errors import ConfigError\n\n\n"
        "class Refusing(Callback):\n"
        "    def on_step(self, report):\n"
        "        if os.environ['SLURM_PROCID'] == '1' and report.step == 3:\n"
        "            raise ConfigError('vars.odd=1 is odd', fix='make it even')\n"
    )
    refusing = "+callbacks.refusing={_target_: refusing.Refusing}"
    assert door(*TWO, refusing, "hydra.run.dir=run").code == 0
    answer = door("jobs", "wait", "run")
    assert "is failed (exit code 2): vars.odd=1 is odd; make it even" in answer.out
    assert answer.code == 2


def test_a_sweep_is_a_submission_for_each_job_and_waits_for_all(slurm, door, home):
    words = ("-m", "+recipe=quick.yaml", "launcher=slurm", "optimizer.lr=0.01,0.1,-1")
    named = "hydra.sweep.dir=sweep"
    shown = door(*words[:-1], "optimizer.lr=0.01,0.1", named, "launcher.dry_run=true")
    assert shown.code == 0, shown.err
    assert shown.out.count("--- command\n") == 2
    assert not (home / "sweep").exists()
    answer = door(*words, named, "launcher.wait_for_end=true")
    assert answer.code == 2, answer.err
    with (home / "sweep" / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done", "done", "failed"]
    for row in rows[:2]:
        result = json.loads((Path(row["run_dir"]) / "result.json").read_text())
        assert float(row["train_loss"]) == result["train_loss"]
    assert len([call for call in slurm.calls() if call[0] == "sbatch"]) == 2
    told = json.loads(door("jobs", "status", "sweep", "--json").out)["jobs"]
    assert [row["state"] for row in told] == ["succeeded", "succeeded"]
    refused = door(
        "-m", "+recipe=quick.yaml", "launcher=slurm", "hydra/sweeper=optuna", "optimizer.lr=0.1,0.2"
    )
    assert refused.code == 2
    assert "set launcher.wait_for_end=true" in refused.err


def test_what_waits_for_ever_says_so_and_can_be_cancelled(slurm, door, home):
    assert door(*TWO[:-1], "launcher.nodes=9", "hydra.run.dir=run").code == 0
    slurm.wait_until(number(home / "run"), "Reason=PartitionConfig")
    told = door("jobs", "status", "run").out
    assert "is queued: for ever: the partition has fewer nodes" in told
    assert door("jobs", "wait", "run", "--timeout", "0").code == 1
    refused = door(*TWO, "hydra.run.dir=run")
    assert refused.code == 2
    assert "run has a job already" in refused.err
    assert not (home / "run" / "result.json").exists()
    assert refused.err.count("\n") == 1
    assert "is cancelled" in door("jobs", "cancel", "run").out


REFUSED = {
    "partition": (["launcher.partition=gpu"], "launcher.partition=gpu: Slurm says invalid part"),
    "gpus": (["launcher.gpus_per_node=4"], "launcher.gpus_per_node=4: Slurm says "),
    "pyxis": (["launcher.container_image=a"], "launcher.container_image needs pyxis"),
    "option": (["launcher.sbatch_options=[--no-such]"], "unrecognized option '--no-such'"),
    "folder": (["launcher.output=/no/such/%j"], "there is no folder /no/such"),
    "secret": (["+vars.password=hunter2"], "vars.password holds a secret"),
    "configuration": (["optimizer.lr=-1"], "optimizer.lr=-1.0 is not 0 or more"),
    "knob": (["task.label_smooth=1"], "unknown knob task.label_smooth"),
    "steps": (["trainer.max_steps=-1"], "trainer.max_steps=-1 is below 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused_and_leaves_nothing(what, slurm, door, home):
    words, sentence = REFUSED[what]
    before = sorted(home.rglob("*"))
    answer = door("+recipe=quick.yaml", "launcher=slurm", *words)
    assert (answer.code, sentence in answer.err) == (2, True), answer.err
    assert answer.err.count("\n") == 1
    assert "hunter2" not in answer.err
    assert sorted(home.rglob("*")) == before
    assert slurm.run("squeue", "--noheader") == ""


def test_without_slurm_the_next_move_is_told(slurm, door, home, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        answer = door("+recipe=quick.yaml", "launcher=slurm")
    assert answer.code == 1
    assert "there is no sbatch on the PATH of this machine" in answer.err
    assert not (home / "runs").exists()


def test_a_folder_that_a_node_does_not_share_is_told(slurm, door, home):
    (home / "runs").mkdir()
    slurm.on("lab1", f"mount -t tmpfs none {home}/runs")
    try:
        assert door(*TWO[:3], "hydra.run.dir=runs/a").code == 0
        assert door("jobs", "wait", "runs/a").code not in (0, 2)
        assert "a disk that the nodes share" in door("jobs", "status", "runs/a").out
        slurm.on("lab1", f"mkdir -p {home}/runs/b/logs")  # its output has a place, its words not
        assert door(*TWO[:3], "hydra.run.dir=runs/b").code == 0
        assert door("jobs", "wait", "runs/b").code == 1
    finally:
        slurm.on("lab1", f"umount {home}/runs")


def test_a_secret_travels_as_the_variable_that_holds_it(slurm, door, home, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    (home / "told.py").write_text(
        "import os\nfrom pathlib import Path\nfrom torsh_trainer import Callback\n\n\n"
        "class Told(Callback):\n"
        "    def __init__(self, token=''):\n"
        "        Path('token').write_text(token)\n"
    )
    words = ("+callbacks.told={_target_: told.Told, token: '${oc.env:MY_TOKEN}'}",)
    assert door("+recipe=quick.yaml", "launcher=slurm", *words, "hydra.run.dir=run").code == 0
    assert door("jobs", "wait", "run").code == 0, (home / "run/logs/job.out").read_text()
    assert (home / "token").read_text() == "hunter2-hunter2"
    written = [path for path in (home / "run").rglob("*") if path.is_file()]
    assert [path for path in written if b"hunter2" in path.read_bytes()] == []


@pytest.mark.exhaustive
def test_the_time_limit_is_warned_of_and_the_run_goes_on_bit_for_bit(
    slurm, door, home, local_losses
):
    (home / "warned.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom torsh_trainer import Callback\n\n\n"
        "class Warned(Callback):\n"
        "    def on_start(self, info):\n"
        "        self.reading, writing = os.pipe()\n"
        "        os.set_blocking(writing, False)\n"
        "        signal.set_wakeup_fd(writing)  # a byte for each signal\n\n"
        "    def on_step(self, report):\n"
        "        mark = Path(f'warned-{os.environ[\"SLURM_PROCID\"]}')\n"
        "        if report.step == 5 and not mark.exists():\n"
        "            os.read(self.reading, 1)\n"
        "            mark.touch()\n"
    )
    warned = "+callbacks.warned={_target_: warned.Warned}"
    words = (warned, "launcher.time='2:30'", "launcher.signal=USR1@60", "hydra.run.dir=run")
    assert door(*TWO, *words).code == 0
    folder = home / "run"
    assert door("jobs", "wait", "run").code == 0, (folder / "logs" / "job.out").read_text()
    assert only(door("jobs", "status", "run", "--json").out)["restarts"] == 1
    assert "stopped by SIGUSR1 after step 5" in (folder / "logs" / "job.out").read_text()
    assert losses(folder) == local_losses


@pytest.mark.exhaustive
def test_a_node_that_goes_down_costs_no_run(
    slurm: SlurmLab, door: Door, home: Path, local_losses: list[float]
):
    folder = home / "run"
    assert door(*TWO, HELD, "checkpoint.every_steps=1", "hydra.run.dir=run").code == 0
    wait_for(home / "held")
    first = number(folder)
    slurm.on("lab2", "ip link set eth0 down")  # its cable is drawn
    try:
        slurm.wait_until(first, "Restarts=1")
        (home / "go").touch()
    finally:
        slurm.on("lab2", "ip link set eth0 up")
    assert door("jobs", "wait", "run").code == 0, (folder / "logs" / "job.out").read_text()
    assert losses(folder) == local_losses
