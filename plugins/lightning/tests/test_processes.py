"""A script of Lightning's with our strategy, started in the ways that there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torsh_mpi.seats import Mpirun

SCRIPT = """
import sys
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
import torsh_trainer_lightning
from torsh_trainer_lightning import TorshStrategy

if __name__ == "__main__":
    how, path = sys.argv[1:]
    L.seed_everything(3, verbose=False)
    strategy = TorshStrategy(how[6:]) if how.startswith("torsh-") else how
    trainer = L.Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_steps=3, limit_val_batches=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    trainer.save_checkpoint(path)
    print("rank", trainer.global_rank, "of", trainer.world_size)
"""
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
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = ended.stdout.splitlines()
    assert sorted(line for line in said if line.startswith("rank")) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


@pytest.fixture(scope="module")
def lightnings(tmp_path_factory) -> dict[str, torch.Tensor]:
    """What Lightning's own ddp makes of it."""
    return typed([sys.executable], tmp_path_factory.mktemp("ddp"), "ddp")


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
