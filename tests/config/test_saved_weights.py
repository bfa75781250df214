"""`trainer.pretrained` of a run's own checkpoint, and `checkpoint.resume=best`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from torsh_trainer.tasks.models import MLP
from torsh_trainer.training.pretrained import start_from

TRAINED = (
    "+recipe=quick.yaml",
    "strategy=single",
    "trainer.max_steps=6",
    "checkpoint.every_steps=2",
    "hydra.run.dir=one",
)


@pytest.fixture
def model(door) -> nn.Module:
    """As the recipe makes it; with its weights at zero."""
    node = door("+recipe=quick.yaml", "--cfg", "job").config["model"]
    del node["_target_"]
    model = MLP(**node)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@pytest.mark.matrix(2)
@pytest.mark.parametrize("place", ["one", "one/checkpoints", "one/checkpoints/step-00000006"])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_run_starts_from_the_weights_of_another(door, home, model, place, averaged):
    knobs = ["trainer.ema_decay=0.5"] if averaged else []
    assert door(*TRAINED, *knobs).code == 0
    flags = ["--ema"] if averaged else []
    door("checkpoint", "export", "one", "--format", "torch", "--output", "w.pt", *flags)
    report = start_from(model, place, strict=True)
    assert report.complete
    assert ("(its moving average)" in str(report)) == averaged
    expected = torch.load("w.pt", weights_only=True)
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {
        k: v.tolist() for k, v in expected.items()
    }


def test_the_command_line_takes_a_run_for_pretrained_weights(door, home):
    assert door(*TRAINED).code == 0
    second = ["+recipe=quick.yaml", "hydra.run.dir=two", "optimizer.lr=0", "log_level=info"]
    assert door(*second, "trainer.pretrained=one", "trainer.eval_every=2").code == 0
    metrics = [
        json.loads((home / run / "result.json").read_text())["metrics"] for run in ("one", "two")
    ]
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"])
    assert "loaded from one/checkpoints/step-00000006" in (home / "two/logs/rank-0.log").read_text()


def test_a_checkpoint_of_another_model_or_a_damaged_one_is_refused(door, home):
    assert door(*TRAINED).code == 0
    answer = door("+recipe=quick.yaml", "trainer.pretrained=one", "model.hidden=[5]")
    assert answer.code == 2
    assert "trainer.pretrained=one/checkpoints/step-00000006 does not fit the model" in answer.err
    for path in Path("one/checkpoints").glob("step-*/*.distcp"):
        path.write_bytes(b"x")
    answer = door("+recipe=quick.yaml", "trainer.pretrained=one")
    assert answer.code == 1
    assert "trainer.pretrained=one: none of the 3 checkpoints" in answer.err
    assert "name another checkpoint, or a file of weights" in answer.err


def best_by(metric: str, mode: str) -> int:
    """The step of the best checkpoint, by the manifests."""
    manifests = [json.loads(p.read_text()) for p in Path("one/checkpoints").glob("*/manifest.json")]
    choose = max if mode == "max" else min
    return int(choose(manifests, key=lambda m: (m["metrics"][metric], -m["step"]))["step"])


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("metric", "mode"), [("loss", "min"), ("loss", "max"), ("accuracy", "max")]
)
def test_best_is_the_checkpoint_that_the_monitor_says(door, home, metric, mode):
    assert door(*TRAINED).code == 0
    knobs = [f"checkpoint.monitor={metric}", f"checkpoint.monitor_mode={mode}"]
    answer = door(*TRAINED, "trainer.stages=[evaluate]", "checkpoint.resume=best", *knobs)
    assert answer.code == 0, answer.err
    assert json.loads((home / "one/result.json").read_text())["steps"] == best_by(metric, mode)


def test_best_of_nothing_is_refused_with_what_there_is(door, home):
    answer = door(*TRAINED, "checkpoint.resume=best")
    assert answer.code == 2
    assert "checkpoint.resume=best: there is no checkpoint in" in answer.err
    shutil.rmtree("one")
    assert door(*TRAINED).code == 0
    answer = door(*TRAINED, "checkpoint.resume=best", "checkpoint.monitor=acuracy")
    assert "set checkpoint.monitor: did you mean 'accuracy'?" in answer.err
    shutil.rmtree("one")
    assert door(*TRAINED, "trainer.eval_every=null").code == 0
    answer = door(*TRAINED, "checkpoint.resume=best")
    assert "no checkpoint in" in answer.err
    assert "let trainer.eval_every meet checkpoint.every_steps" in answer.err
