"""A script of Lightning's with our strategy, started in the ways that there are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from scripts import SCRIPT, state, trained
from torsh_mpi.seats import Mpirun
from torsh_trainer_lightning import TorshStrategy

from torsh_trainer.errors import ConfigError

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


def by_mpirun() -> list[str]:
    """The words before the script."""
    return [*Mpirun().command(2, env=os.environ), sys.executable]


def typed(command: list[str], folder: Path, how: str) -> dict[str, torch.Tensor]:
    """What is trained by the script, started by ``command``."""
    script, path = folder / "script.py", folder / f"{how}.ckpt"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [*command, str(script), how, str(path)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = ended.stdout.splitlines()
    assert sorted(line for line in said if line.startswith("rank")) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]
    return state(path)


@pytest.fixture(scope="module")
def lightnings(on_ranks, tmp_path_factory) -> dict[str, torch.Tensor]:
    """What Lightning's own ddp makes of it."""
    state, _ = on_ranks(trained, tmp_path_factory.mktemp("ddp"))
    return state


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("started", "how"),
    [
        (lambda: [sys.executable], "torsh_fsdp"),
        (lambda: TORCHRUN, "torsh-ddp"),
        (by_mpirun, "torsh-mpi"),
    ],
    ids=["one command", "torchrun", "mpirun"],
)
def test_a_script_runs_on_two_processes_however_they_are_started(
    tmp_path, lightnings, started, how
):
    torch.testing.assert_close(typed(started(), tmp_path, how), lightnings)


# -- what is refused, and what Slurm is to Lightning ----------------------------------------------

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "vm",
}
"""What srun of Slurm 22.05 tells the second of two processes."""


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_another_number_of_devices_than_there_are_processes_is_refused(monkeypatch):
    set_all(monkeypatch, STEP)
    with pytest.raises(ConfigError, match=r"slurm has started 2 .* give Trainer\(devices=2"):
        L.Trainer(strategy=TorshStrategy("ddp"), devices=1, accelerator="cpu", logger=False)


def test_the_script_of_an_allocation_waits_for_nobody(monkeypatch):
    # The last 16 numbers of a step are no srun's: this is what sbatch gives its script.
    batch = {"SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "2"}
    set_all(monkeypatch, {**STEP, **batch})
    flags = {"devices": 2, "accelerator": "cpu", "logger": False}
    with pytest.raises(ConfigError, match="write srun before python"):
        L.Trainer(strategy=TorshStrategy("ddp"), **flags)
    here = TorshStrategy("ddp", cluster_environment=LightningEnvironment())
    trainer = L.Trainer(strategy=here, **flags)
    assert not trainer.strategy.cluster_environment.creates_processes_externally


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_one_process_needs_no_variable_of_a_step(monkeypatch, tmp_path, name):
    set_all(monkeypatch, {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"})
    flags = {"devices": 1, "accelerator": "cpu", "fast_dev_run": True, "logger": False}
    alone = L.Trainer(**flags)
    alone.fit(BoringModel())
    for strategy in (f"torsh_{name}", TorshStrategy(name)):
        trainer = L.Trainer(strategy=strategy, default_root_dir=tmp_path, **flags)
        trainer.fit(BoringModel())
        assert (trainer.global_rank, trainer.world_size) == (alone.global_rank, alone.world_size)
        assert trainer.global_step == alone.global_step
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_a_step_of_slurms_is_queued_again_as_lightning_would(monkeypatch):
    set_all(monkeypatch, {**STEP, "SLURM_NTASKS_PER_NODE": "2"})
    asked = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
    flags = {"devices": 2, "accelerator": "cpu", "logger": False}
    for trainer in (
        L.Trainer(strategy="torsh_ddp", plugins=[asked], **flags),
        L.Trainer(strategy=TorshStrategy("ddp", cluster_environment=asked), **flags),
    ):
        found = trainer.strategy.cluster_environment
        assert isinstance(found, SLURMEnvironment)
        assert found.requeue_signal == signal.SIGUSR2
        assert found.global_rank() == 1
        assert trainer.world_size == 2
    found = TorshStrategy("ddp").cluster_environment
    assert isinstance(found, SLURMEnvironment)
    assert found.auto_requeue
