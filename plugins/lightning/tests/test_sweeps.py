"""A Lightning user's own Hydra application: a sweep whose jobs have two processes each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from loops import as_torchrun, quiet
from torsh_trainer_lightning.starting import command

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

CONFIG = """
defaults: [_self_]
how: by_trainer
lr: 0.05
folder: ${hydra:runtime.output_dir}
hydra: {job: {chdir: true}}
"""
SCRIPT = """
import hydra
import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torsh_trainer_lightning import TorshFabricStrategy, TorshStrategy

MINE = {"accelerator": "cpu", "devices": 2}

class Model(BoringModel):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

def by_trainer(config):
    trainer = L.Trainer(
        strategy=TorshStrategy("ddp"), max_steps=3, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **MINE,
    )
    model = Model(config.lr)
    trainer.fit(model)
    return trainer.global_rank, model

def by_fabric(config):
    fabric = L.Fabric(strategy=TorshFabricStrategy("ddp"), **MINE)
    fabric.launch()
    model = Model(config.lr)
    loader = fabric.setup_dataloaders(model.train_dataloader())
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    for _, batch in zip(range(3), loader):
        fabric.backward(model.loss(wrapped(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return fabric.global_rank, model

def failing(config):
    by_trainer(config)
    raise ValueError("fails on purpose")

@hydra.main(version_base="1.3", config_path=".", config_name="mine")
def main(config):
    L.seed_everything(3, verbose=False)
    rank, model = globals()[config.how](config)
    torch.save(model.state_dict(), f"{config.folder}/rank-{rank}.pt")

if __name__ == "__main__":
    main()
"""


def by_lightning(world: World, port: int, folder: Path, jobs: list[str]) -> dict[str, Any]:
    """What each of these jobs trains with Lightning's own ``ddp``."""
    script: dict[str, Any] = {"__name__": "script"}
    exec(re.sub(r'Torsh\w*Strategy\("ddp"\)', '"ddp"', SCRIPT), script)
    quiet()
    told = {}
    for job in jobs:
        as_torchrun(world, port, folder / job)
        L.seed_everything(3, verbose=False)
        _, model = script[job](SimpleNamespace(lr=0.05))
        told[job] = {name: value.clone() for name, value in model.state_dict().items()}
    torch.distributed.destroy_process_group()
    return told


@pytest.mark.exhaustive
def test_every_job_of_a_sweep_has_its_own_processes_folder_and_result(tmp_path, on_ranks):
    (tmp_path / "mine.yaml").write_text(CONFIG)
    (tmp_path / "mine.py").write_text(SCRIPT)
    swept = ["mine.py", "-m", "how=failing,by_trainer,by_fabric", "hydra.sweep.dir=sweep"]
    ended = subprocess.run(
        [sys.executable, *swept, "hydra.sweep.subdir=${how}"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert ended.returncode == 1
    assert "fails on purpose" in ended.stderr
    expected, _ = on_ranks(by_lightning, tmp_path / "expected", ["by_trainer", "by_fabric"])
    for job, trained in expected.items():
        folder = tmp_path / "sweep" / job
        assert sorted(path.name for path in folder.glob("*")) == [
            ".hydra",
            "mine.log",
            "mine_rank_1.log",
            "rank-0.pt",
            "rank-1.pt",
        ]
        for rank in range(2):
            found = torch.load(folder / f"rank-{rank}.pt")
            torch.testing.assert_close(found, trained, rtol=0, atol=0)
    assert not list(tmp_path.glob("sweep/failing/rank-*"))


@pytest.fixture
def composed(tmp_path):
    """``composed(overrides)``: Hydra's own configuration of a job."""
    (tmp_path / "mine.yaml").write_text(CONFIG)

    def made(*overrides: str) -> Any:
        with initialize_config_dir(str(tmp_path), version_base="1.3", job_name="mine"):
            job = compose("mine", list(overrides), return_hydra_config=True).hydra
        values = {"num": 1, "id": "1"}
        for name, value in values.items():
            job.job[name] = value
        job.runtime.output_dir = 'sweep/a "b"'
        job.overrides.hydra.append("hydra.mode=MULTIRUN")
        return job

    return made


def test_another_process_is_told_one_job_and_the_flags_that_were_typed(composed, monkeypatch):
    typed = ["mine.py", "-m", "--config-dir", "more", "lr=0.1,0.2", "-cn", "mine"]
    monkeypatch.setattr(sys, "argv", typed)
    job = composed("lr=0.2", "hydra.verbose=true", "hydra.sweep.dir=sweep")
    words = command(job, 1)
    assert words[words.index("--config-dir") + 1] == "more"
    assert words[words.index("--config-name") + 1] == "mine"
    assert "lr=0.2" in words
    assert "hydra.verbose=true" in words
    assert 'hydra.run.dir="sweep/a \\"b\\""' in words
    assert "hydra.mode=RUN" in words
    assert not {"lr=0.1,0.2", "hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep"} & {*words}


def test_a_launcher_of_hydras_that_hides_the_script_is_refused(composed, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", "-m"])
    with pytest.raises(ConfigError, match=r"hydra/launcher=joblib .* leave hydra/launcher=basic"):
        command(composed("hydra/launcher=joblib"), 1)
