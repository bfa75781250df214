"""A real Slurm: its controller and two nodes, in namespaces of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.isolation import require_isolation
from tests.launchers.kubernetes import KubeLab, require_kubernetes, start_cluster
from torsh_trainer.launchers.kubernetes.launcher import KubernetesLauncher
from torsh_trainer.launchers.slurm.launcher import SlurmLauncher

HERE = Path(__file__).parent
PATIENCE_S = 240.0
CLIENTS = ("sbatch", "scontrol", "scancel", "squeue", "sinfo", "sacct", "srun")
CLIENT = """#!/bin/bash
[[ $(hostname) == lab* ]] && exec {path} "$@"  # within a job, which inherits the PATH
printf '%s\\0' {name} "$@" >> {folder}/calls; printf '\\n\\0' >> {folder}/calls
export SLURM_CONF={folder}/slurm.conf
exec nsenter -t {pid} --net --mount --uts --pid env -C "$PWD" {path} "$@"
"""

QUICK = """\
# A recipe that trains in a second.
defaults:
  - override /task: classification
  - override /model: mlp
  - override /data: digits

trainer: {max_steps: 12, log_every: 1, eval_every_epochs: null, eval_every: 12}
data: {batch_size: 32}
optimizer: {lr: 0.01}
callbacks:
  console: {enabled: false}
logger:
  tensorboard: {enabled: false}
"""
HELD = '''\
"""A run that waits at its fifth step, the first time that it comes there."""

import time
from pathlib import Path

from torsh_trainer import Callback


class Held(Callback):
    def on_step(self, report):
        if report.step == 5 and not Path("go").exists():
            Path("held").touch()
            while not Path("go").exists():
                time.sleep(0.05)
'''


def require_slurm() -> None:
    """As ``require_isolation``, for Slurm and munge too."""
    require_isolation()
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    programs = (*CLIENTS, "slurmctld", "slurmd", "munged", "nsenter")
    missing = [name for name in programs if not shutil.which(name, path=path)]
    assert not missing, f"install slurm-wlm and munge (.ci/run): {', '.join(missing)} missing"


@dataclass(frozen=True)
class SlurmLab:
    """A cluster that runs. ``bin`` holds Slurm's programs, as a login node has them."""

    folder: Path
    bin: Path

    def run(self, *words: str) -> str:
        """What a program of Slurm's prints."""
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]], capture_output=True, text=True, check=True
        )
        return done.stdout

    def on(self, host: str, script: str) -> None:
        """Runs a shell script on a node."""
        words = [str(self.bin / "enter"), str(self.folder / f"run-{host}"), "bash", "-euc", script]
        subprocess.run(words, check=True, cwd=self.folder)

    def job(self, number: str) -> str:
        """What Slurm knows of a job, on one line."""
        return self.run("scontrol", "show", "job", number, "--oneliner")

    def wait_until(self, number: str, text: str) -> None:
        """Returns once ``job`` tells ``text``."""
        end = time.monotonic() + PATIENCE_S
        while text not in self.job(number):
            assert time.monotonic() < end, f"no {text} in {self.job(number)}"
            time.sleep(0.1)

    def calls(self) -> list[list[str]]:
        """The command lines of Slurm's programs so far, word by word."""
        text = (self.folder / "calls").read_text()
        return [line.split("\0")[:-1] for line in text.split("\n\0") if line]


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmLab]:
    """Two nodes of two processors; it begins when the first test asks for it."""
    require_slurm()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: munge's socket has 100 characters
    words = [HERE.parent / "lab.sh", folder, "2", HERE / "slurm_lab.sh", "2"]
    with (folder / "out").open("w") as out:
        lab = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *map(str, words)],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the tests, whose end is its own
        )
    try:
        end = time.monotonic() + PATIENCE_S
        while not (folder / "ready").exists():
            assert lab.poll() is None, (folder / "out").read_text()
            assert time.monotonic() < end, "Slurm does not come up: " + (folder / "out").read_text()
            time.sleep(0.1)
        (child,) = Path(f"/proc/{lab.pid}/task/{lab.pid}/children").read_text().split()
        _write_clients(folder, child)
        yield SlurmLab(folder, folder / "bin")
    finally:
        lab.send_signal(signal.SIGKILL)  # with it end the namespaces, and all that is in them
        lab.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _write_clients(folder: Path, pid: str) -> None:
    (folder / "bin").mkdir()
    for name in (*CLIENTS, "enter"):  # the last runs whatever it is given
        path = "" if name == "enter" else shutil.which(name)
        client = folder / "bin" / name
        client.write_text(CLIENT.format(name=name, folder=folder, pid=pid, path=path))
        client.chmod(0o755)


@pytest.fixture
def slurm(slurm_cluster: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """The cluster, with its programs on the PATH; what a test leaves in the queue ends with it."""
    monkeypatch.setenv("PATH", f"{slurm_cluster.bin}:{os.environ['PATH']}")
    monkeypatch.setattr(SlurmLauncher, "poll_s", 0.2)
    (slurm_cluster.folder / "calls").write_text("")
    yield slurm_cluster
    slurm_cluster.run("scancel", "--full", "--user=root")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: ``quick.yaml``, a recipe, and ``held.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").write_text(QUICK)
    (tmp_path / "held.py").write_text(HELD)
    return tmp_path


def losses(run_dir: Path) -> list[float]:
    """The training losses of a run, step by step; those of a step that was repeated, the last."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [*{row["step"]: row["loss"] for row in rows if row["split"] == "train"}.values()]


@pytest.fixture(scope="session")
def local_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the recipe on two processes of ``launcher=local``."""
    home = tmp_path_factory.mktemp("local")
    (home / "quick.yaml").write_text(QUICK)
    words = ("+recipe=quick.yaml", "strategy=ddp", "launcher.num_processes=2")
    command = [sys.executable, "-m", "torsh_trainer", *words, "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return losses(home / "run")


@pytest.fixture(scope="session")
def kube_cluster() -> Iterator[KubeLab]:
    """A Kubernetes of this machine; it begins when the first test asks for it."""
    require_kubernetes()
    with start_cluster() as lab:
        yield lab


@pytest.fixture
def kube(kube_cluster: KubeLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeLab]:
    """The cluster, for kubectl as users call it; what a test leaves there ends with it."""
    monkeypatch.setenv("KUBECONFIG", str(kube_cluster.config))
    monkeypatch.setattr(KubernetesLauncher, "poll_s", 0.2)
    yield kube_cluster
    label = "--selector=torsh-trainer/run"
    kube_cluster.run("delete", "jobs,services,pods", label, "--wait=false", "--grace-period=1")
