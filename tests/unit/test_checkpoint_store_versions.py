"""Checkpoints of older formats are read by today's release, and stay as they are.

tests/data/checkpoint_v1 was written by the release before version 2: two ranks under FSDP, step 4
of 8. ``went_on.jsonl`` is what that very run reported for the steps after it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import TensorDataset

from torsh_trainer import CheckpointOptions, DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.callbacks.early_stopping import EarlyStopping
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.checkpoint import migration
from torsh_trainer.checkpoint.migration import MIGRATIONS, VERSION, Migration
from torsh_trainer.checkpoint.state import read_state
from torsh_trainer.checkpoint.store.finding import find
from torsh_trainer.checkpoint.store.integrity import digest, read_manifest, verify
from torsh_trainer.optim.schedule.shapes import Linear

V1 = Path(__file__).parents[1] / "data" / "checkpoint_v1"
STEP_4 = V1 / "step-00000004"


class Small(Task):
    """What the old checkpoint was trained on."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(24, 3, generator=generator)
        targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]])
        self.data = DataSource()
        self.data.train = self.data.eval = TensorDataset(inputs, targets)
        self.optimizer = OptimizerSpec("SGD", lr=0.05, options={"momentum": 0.9})

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


def run_on(folder: Path, *, resume: str) -> list[dict]:
    """The reports of the steps, trained as the old run was, on one process."""
    trainer = Trainer(
        task=Small(),
        strategy="single",
        loading=Loading(batch_size=8),
        schedule=Linear(warmup_steps=2),
        callbacks=[EarlyStopping(patience=100), Jsonl()],
        checkpoint=CheckpointOptions(every_steps=4, resume=resume),
        run_dir=folder,
        log_every=1,
        max_steps=8,
        eval_every=4,
        eval_every_epochs=None,
        ema_decay=0.9,
        device="cpu",
        seed=5,
        max_grad_norm=1.0,
    )
    trainer.fit()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["split"] == "train"]


def test_every_version_leads_to_the_next():
    assert sorted(MIGRATIONS) == list(range(1, VERSION))


def test_the_checkpoint_of_version_1_is_whole():
    assert verify(STEP_4).version == 1
    assert find(str(V1), V1) == STEP_4


def test_a_run_goes_on_from_version_1_as_the_old_release_did(tmp_path):
    before = {path.name: digest(path) for path in STEP_4.iterdir()}
    told = run_on(tmp_path, resume=str(STEP_4))
    went_on = [json.loads(line) for line in (V1 / "went_on.jsonl").read_text().splitlines()]
    assert [row["step"] for row in told] == [row["step"] for row in went_on] == [5, 6, 7, 8]
    for row, expected in zip(told, went_on, strict=True):
        for name, value in expected.items():
            # Two ranks added their halves up, one process adds up all of a batch.
            assert row[name] == pytest.approx(value, rel=1e-6), (row["step"], name)
    assert {path.name: digest(path) for path in STEP_4.iterdir()} == before
    new = tmp_path / "checkpoints" / "step-00000008"
    assert read_manifest(new).version == VERSION > 1


def test_what_goes_on_is_the_checkpoint_and_not_the_seed(tmp_path):
    fresh = {row["step"]: row for row in run_on(tmp_path, resume="never")}
    first = json.loads((V1 / "went_on.jsonl").read_text().splitlines()[0])
    # The same run from its beginning comes to the same loss; a wrong weight would not.
    assert fresh[5]["loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert fresh[5]["loss"] != pytest.approx(fresh[4]["loss"], rel=1e-6)


def test_the_random_streams_of_version_1_come_in_the_form_of_today(monkeypatch):
    stream = torch.zeros_like(torch.get_rng_state())
    dcp.load({"rng": {"rank_1": stream}}, checkpoint_id=STEP_4, no_dist=True)
    tensors = {("rng", "rank_1"): stream}
    state = read_state(STEP_4, tensors)
    assert torch.equal(state["rng"]["rank_1"]["torch"], stream)
    assert state["position"]["step"] == 4
    assert state["setup"] == state["config"] == state["feed"] == {}
    monkeypatch.setitem(migration.MIGRATIONS, 1, Migration())
    untouched = read_state(STEP_4, tensors)
    assert untouched["rng"]["rank_1"] is stream
    assert "setup" not in untouched
