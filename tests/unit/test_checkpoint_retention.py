"""Which checkpoints stay: the last, the best, those of every so many steps, and nobody else's."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.callbacks.base import Callback
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store.retention import candidates, complete
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError

STATE = {"w": torch.ones(2)}


def checkpointer(folder: Path, **options) -> DcpCheckpointer:
    return DcpCheckpointer(folder, LocalCommunicator(), CheckpointOptions(**options))


def kept(folder: Path, metrics: dict[int, dict[str, float]], **options) -> list[int]:
    saver = checkpointer(folder, **options)
    for step, measured in metrics.items():
        saver.save(step, STATE, measured)
    saver.close()
    return saver.steps()


def losses(*values: float) -> dict[int, dict[str, float]]:
    """Step -> metrics; from step 1 on."""
    return {step: {"loss": value} for step, value in enumerate(values, 1)}


def test_without_rules_all_stay(tmp_path):
    assert kept(tmp_path, losses(3, 1, 2, 5)) == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_best_stay_and_so_does_the_newest(tmp_path, mode):
    values = (3.0, 1.0, 2.0, 5.0, 4.0)
    best = sorted(range(1, 6), key=lambda step: values[step - 1])[:2]
    assert kept(tmp_path, losses(*values), keep_best=2, mode=mode) == sorted({*best, 5})


def test_with_mode_max_the_highest_are_the_best(tmp_path):
    metrics = {
        step: {"accuracy": value, "loss": -value}
        for step, value in enumerate((0.1, 0.9, 0.5, 0.8, 0.2), 1)
    }
    rules = {"keep_best": 2, "monitor": "accuracy", "monitor_mode": "max"}
    assert kept(tmp_path, metrics, **rules) == [2, 4, 5]


def test_a_checkpoint_stays_when_any_rule_keeps_it(tmp_path):
    values = losses(1.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0)
    assert kept(tmp_path, values, keep_last=2, keep_best=1, keep_every=3) == [1, 3, 6, 7]


def test_the_newest_stays_whatever_the_rules_say(tmp_path):
    assert kept(tmp_path, losses(1.0, 2.0, 3.0), keep_every=100) == [3]


def test_of_equal_ones_the_older_is_the_better(tmp_path):
    assert kept(tmp_path, losses(1.0, 1.0, 1.0, 2.0), keep_best=1) == [1, 4]


def test_what_is_not_finite_or_was_not_measured_is_never_the_best(tmp_path):
    metrics = losses(2.0, math.nan, 1.0, -math.inf) | {5: {}, 6: {}}
    assert kept(tmp_path, metrics, keep_best=3) == [1, 3, 6]


def test_the_best_of_the_time_before_a_resume_count(tmp_path):
    kept(tmp_path, losses(1.0, 3.0), keep_best=1)
    second = checkpointer(tmp_path, keep_best=1)
    second.load(STATE)
    second.save(3, STATE, {"loss": 2.0})
    second.save(4, STATE, {"loss": 2.5})
    assert second.steps() == [1, 4]


def test_a_metric_that_is_not_there_is_named_with_those_that_are(tmp_path):
    saver = checkpointer(tmp_path, keep_best=1, monitor="acuracy", monitor_mode="max")
    saver.save(1, STATE, {})  # before the first evaluation
    with pytest.raises(
        ConfigError, match=r"checkpoint.monitor=acuracy .* accuracy, loss"
    ) as caught:
        saver.save(2, STATE, {"loss": 1.0, "accuracy": 0.5})
    assert "did you mean 'accuracy'" in caught.value.fix
    assert saver.steps() == [1]


def test_a_run_that_never_measured_anything_is_told_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="torsh_trainer"):
        kept(tmp_path, {1: {}, 2: {}}, keep_best=1)
        assert "no save came with metrics" in caplog.text
        caplog.clear()
        kept(tmp_path / "other", {1: {}, 2: {"loss": 1.0}}, keep_best=1)
    assert caplog.text == ""


def test_only_complete_checkpoints_of_this_run_are_deleted(tmp_path):
    kept(tmp_path, losses(9.0, 9.0))  # another run's
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "notes.txt").write_text("mine")
    saver = checkpointer(tmp_path, keep_last=1)
    damaged = saver.save(4, STATE, {})
    (damaged / "state.json").write_text("")
    for step in (5, 6):
        saver.save(step, STATE, {})
    names = [path.name[-1] for path in candidates(tmp_path)]
    assert names == ["1", "2", "3", "4", "6"]
    assert (tmp_path / "step-00000003" / "notes.txt").read_text() == "mine"


def test_a_step_that_another_run_has_saved_is_saved_beside_it(tmp_path):
    first = checkpointer(tmp_path)
    theirs = first.save(1, {"w": torch.full((2,), 1.0)}, {})
    second = checkpointer(tmp_path)
    ours = second.save(1, {"w": torch.full((2,), 2.0)}, {})
    assert (theirs.name, ours.name) == ("step-00000001", "step-00000001.2")
    assert first.load({"w": torch.zeros(2)}, path=theirs)["w"].tolist() == [1.0, 1.0]
    assert second.find("auto") == ours
    assert second.load({"w": torch.zeros(2)}, 1)["w"].tolist() == [2.0, 2.0]
    again = second.save(1, {"w": torch.full((2,), 3.0)}, {})  # of its own, the new one is enough
    assert again == ours
    assert [one.path for one in complete(tmp_path)] == [theirs, ours]
    assert second.load({"w": torch.zeros(2)}, 1)["w"].tolist() == [3.0, 3.0]


def test_the_best_and_the_last_count_checkpoints_and_not_less_than_one():
    for knob in ("keep_last", "keep_best", "keep_every"):
        with pytest.raises(ConfigError, match=f"checkpoint.{knob}=0"):
            CheckpointOptions(**{knob: 0})
    with pytest.raises(ConfigError, match=r"checkpoint\.monitor_mode=least"):
        CheckpointOptions(monitor_mode="least")  # type: ignore[arg-type]


class Fit(Task):
    """A line through points; few enough to evaluate after any step."""

    def __init__(self) -> None:
        inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
        self.data = DataSource()
        self.data.train = self.data.eval = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.optimizer = OptimizerSpec("SGD", lr=0.5)

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


def test_only_what_was_evaluated_itself_is_among_the_best_of_a_run(tmp_path):
    measured: dict[int, float] = {}

    class Listen(Callback):
        def on_evaluate(self, report) -> None:
            measured[report.step] = report.metrics["loss"]

    Trainer(
        task=Fit(),
        strategy="single",
        loading=Loading(batch_size=4),
        callbacks=[Listen()],
        checkpoint=CheckpointOptions(every_steps=1, keep_best=2),
        run_dir=tmp_path,
        max_steps=8,
        eval_every=2,
        eval_every_epochs=None,
        device="cpu",
    ).fit()
    assert sorted(measured) == [2, 4, 6, 8]
    best = sorted(measured, key=lambda step: measured[step])[:2]
    found = complete(tmp_path / "checkpoints")
    assert [one.manifest.step for one in found] == sorted({*best, 8})
    assert {one.manifest.step: one.manifest.metrics["loss"] for one in found} == {
        step: measured[step] for step in {*best, 8}
    }
