"""A rank that raises ends its job within seconds, though tearing down would wait for the others.

The backend's destruction is made to take a minute, as NCCL's does that flushes a collective which
never ends: with it come the end of the process, and on the other ranks the news of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from torsh_trainer.environments.world import World
from torsh_trainer.testing.ranks import torchrun_variables

SOON_S = 30
"""Five seconds and what a loaded machine needs; half of what the destruction takes."""

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torsh_trainer import Callback, CheckpointOptions, DataSource, Loading, Task, Trainer
from torsh_trainer.training import process
from torsh_trainer.comm import watching
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.launchers.local import Local
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.parallel import Parallel

WHERE, SIZE, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


def broken(where):
    wanted = "training" if WHERE in ("on_error", "a stage") else WHERE
    if where == wanted and dist.get_rank() == 1:
        FOLDER.joinpath("raised").write_text(str(time.time()))
        raise ValueError("the words of the rank that raised")


class Fails(Callback):
    def on_step(self, report):
        broken("callback")

    def on_error(self, error):
        if WHERE == "on_error":
            time.sleep(60)


class Line(Task):
    def __init__(self):
        self.data = DataSource()
        self.data.train = self.data.eval = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))

    def build_model(self):
        module = dist.distributed_c10d
        dist.destroy_process_group = module._abort_process_group = lambda *group: time.sleep(60)
        save = DcpCheckpointer.save

        def fails(*args):
            broken("save")
            return save(*args)

        DcpCheckpointer.save = fails
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def loss(self, outputs, batch):
        if WHERE == "never comes" and dist.get_rank() == 1:
            time.sleep(600)
        broken("training" if outputs.requires_grad else "evaluation")
        return F.mse_loss(outputs, batch[1])


if __name__ == "__main__":
    process.ON_ERROR_S = 1.0
    watching.BACKENDS = ("gloo",) if WHERE == "never comes" else watching.BACKENDS
    Trainer(
        task=Line(),
        loading=Loading(batch_size=16, micro_batch_size=4),
        comm=CommOptions(timeout_s=30.0),
        strategy=Parallel() if WHERE == "a stage" else DDP(),
        mesh=MeshOptions(pp=2 if WHERE == "a stage" else 1),
        launcher=Local(num_processes="auto" if "RANK" in os.environ else SIZE),
        callbacks=[Fails()],
        max_steps=4,
        eval_every=2,
        checkpoint=CheckpointOptions(every_steps=3),
        run_dir=FOLDER / "run",
        device="cpu",
    ).run()
"""
WORDS = "ValueError: the words of the rank that raised"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def start(script: Path, where: str, size: int, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, script, where, str(size), script.parent],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def seconds_since_the_raise(script: Path) -> float:
    return time.time() - float((script.parent / "raised").read_text())


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("where", "size"),
    [("training", 2), ("training", 4), ("save", 2), ("a stage", 2)],
)
@pytest.mark.exhaustive
def test_a_rank_that_raises_ends_the_job_of_the_launcher_with_its_words(where, size, script):
    job = start(script, where, size)
    _, error = job.communicate(timeout=480)
    assert seconds_since_the_raise(script) < SOON_S
    assert job.returncode == 1, error
    assert f"rank 1 failed with {WORDS}" in error, error


def start_two(script: Path, where: str, store: TCPStore) -> list[subprocess.Popen[str]]:
    """As torchrun does, whose store this process serves."""
    worlds = [World(rank=rank, size=2, local_rank=rank, local_size=2) for rank in range(2)]
    return [start(script, where, 2, **torchrun_variables(w, store.port)) for w in worlds]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("where", ["evaluation", "callback", "on_error"])
@pytest.mark.exhaustive
def test_so_does_one_that_another_program_started(where, script):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = start_two(script, where, store)
    _, error = ranks[1].communicate(timeout=480)
    assert seconds_since_the_raise(script) < SOON_S
    assert ranks[1].returncode == (3 if where == "on_error" else 1), error
    assert WORDS in error, error
    _, error = ranks[0].communicate(timeout=480)  # gloo sees that the other has ended
    assert ranks[0].returncode != 0, error
    assert seconds_since_the_raise(script) < SOON_S, error


def test_a_run_over_a_backend_that_hangs_ends_with_the_line_of_the_rank_that_never_comes(script):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waits, sleeps = start_two(script, "never comes", store)
    try:
        _, error = waits.communicate(timeout=480)
    finally:
        sleeps.kill()
        sleeps.communicate()
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "sleep(600)" in text)
    assert waits.returncode == 3, error
    assert "rank 1 of 2 had not come to collective" in error, error
    assert f"rank 1 was at {script}:{line}" in error, error
    assert "rank 1 of 2" in (script.parent / "run" / "result.json").read_text()
