"""Scripts and runs started by the real srun: a cluster of one node, brought up for these tests."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template

import pytest
import torch
from scripts import SCRIPT, state, trained

CONF = Template("""
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$home/munge.sock
SlurmctldPort=$controller
SlurmdPort=$daemon
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The variables under which srun finds a cluster of this host, with two processors."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [
        name for name in ("munged", "slurmctld", "srun") if not shutil.which(name, path=path)
    ]
    if missing:
        pytest.fail(f"{', '.join(missing)}: install the packages munge and slurm-wlm")
    host = socket.gethostname().partition(".")[0]
    # A socket's name is short, so that the folder is not one of pytest's.
    home = Path(tempfile.mkdtemp(prefix="slurm-"))
    for folder in ("state", "spool"):
        (home / folder).mkdir()
    (home / "slurm.conf").write_text(
        CONF.substitute(
            host=host,
            user=getpass.getuser(),
            home=home,
            controller=free_port(),
            daemon=free_port(),
        )
    )
    key = home / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    munge = {
        "key-file": key,
        "socket": home / "munge.sock",
        "log-file": home / "munged.log",
        "pid-file": home / "munged.pid",
        "seed-file": home / "munged.seed",
    }
    daemons = [
        [
            "munged",
            "--foreground",
            "--force",
            *(f"--{name}={file}" for name, file in munge.items()),
        ],
        ["slurmctld", "-D", "-f", f"{home}/slurm.conf"],
        ["slurmd", "-D", "-f", f"{home}/slurm.conf", "-N", host],
    ]
    env = {**os.environ, "PATH": path, "SLURM_CONF": str(home / "slurm.conf")}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        for command in daemons:
            log = stack.enter_context((home / f"{command[0]}.out").open("wb"))
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.send_signal, signal.SIGTERM)
            if command[0] == "munged":
                wait_for((home / "munge.sock").exists, home)
        wait_for(lambda: "idle" in said(["sinfo", "-h", "-o", "%t"], env), home)
        yield {"PATH": path, "SLURM_CONF": env["SLURM_CONF"]}


def wait_for(there: Callable[[], bool], home: Path) -> None:
    """Returns once it is there; what the daemons have said, where it does not come."""
    deadline = time.monotonic() + 240
    while not there():
        if time.monotonic() > deadline:
            pytest.fail("\n".join(file.read_text() for file in home.glob("*.out")))
        time.sleep(0.05)


def said(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout


@pytest.fixture
def srun(slurm, tmp_path) -> Callable[..., str]:
    """``srun(*args)``: what ``srun -n 2 python ARGS`` says."""

    def run(*args: str) -> str:
        found = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ended = subprocess.run(
            ["srun", "-n", "2", sys.executable, *args],
            cwd=tmp_path,
            env={**os.environ, **slurm, "PYTHONPATH": os.pathsep.join(found)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=800,
        )
        assert ended.returncode == 0, ended.stdout[-3000:]
        return ended.stdout

    return run


@pytest.mark.exhaustive
def test_a_script_of_lightnings_trains_the_same_under_srun(srun, tmp_path, on_ranks):
    (tmp_path / "script.py").write_text(SCRIPT)
    text = srun("script.py", "torsh-fsdp", "fsdp.ckpt")
    assert {"rank 0 of 2", "rank 1 of 2"} <= {*text.splitlines()}
    expected, _ = on_ranks(trained, tmp_path / "expected")
    torch.testing.assert_close(state(tmp_path / "fsdp.ckpt"), expected)


@pytest.mark.exhaustive
def test_our_loop_trains_the_same_under_srun(srun, tmp_path, door):
    args = [
        "task=lightning",
        "task.module._target_=modules.variations.Plain",
        "task.datamodule._target_=modules.data.Samples",
        "trainer.max_steps=3",
        "trainer.log_every=1",
        "strategy=ddp",
        "log_level=warning",
    ]
    srun("-m", "torsh_trainer", *args, "hydra.run.dir=srun")
    code, text = door([*args, "hydra.run.dir=torchrun"], tmp_path, processes=2)
    assert code == 0, text
    assert losses(tmp_path / "srun") == losses(tmp_path / "torchrun")
    assert json.loads((tmp_path / "srun" / "result.json").read_text())["world_size"] == 2


def losses(run: Path) -> list[float]:
    """What the run has logged of its training."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(found) == 3
    return found
