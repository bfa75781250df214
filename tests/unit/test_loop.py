"""The loop on one process, driven through the library's door."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from torsh_trainer import (
    Callback,
    CheckpointOptions,
    DataSource,
    Loading,
    OptimizerSpec,
    Task,
    Trainer,
)
from torsh_trainer.callbacks.base import EvaluationReport, RunInfo, SaveReport, StepReport
from torsh_trainer.data.sampler import epoch_order
from torsh_trainer.errors import ConfigError, Interrupted, TrainingError
from torsh_trainer.optim.schedule.shapes import Linear

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.arange(6.0)).unsqueeze(1)


class Source(DataSource):
    def __init__(self, train: Any = None, test: Any = None, predict: Any = None) -> None:
        self.train = TensorDataset(X, Y) if train is None else train
        self.eval = TensorDataset(X[:10], Y[:10])
        self.test = test
        self.predict = predict


class Line(Task):
    """Linear regression by SGD: small enough to be written out again in plain torch."""

    optimizer = OptimizerSpec("SGD", lr=0.05)

    def __init__(self, data: DataSource | None = None) -> None:
        self.data = data or Source()

    def build_model(self) -> nn.Module:
        return nn.Linear(6, 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


class Recorder(Callback):
    """Keeps all that it was told, in order."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.evaluations: list[EvaluationReport] = []
        self.saves: list[SaveReport] = []
        self.info: RunInfo | None = None
        self.errors: list[BaseException] = []
        self.ended = 0

    def on_start(self, info: RunInfo) -> None:
        self.info = info

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_evaluate(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def on_save(self, report: SaveReport) -> None:
        self.saves.append(report)

    def on_error(self, error: BaseException) -> None:
        self.errors.append(error)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self.ended += 1


def trainer(tmp_path: Path, **knobs: Any) -> Trainer:
    """A trainer of ten steps that reports each one."""
    defaults: dict[str, Any] = {
        "task": Line(),
        "strategy": "single",
        "loading": Loading(batch_size=8),
        "max_steps": 10,
        "log_every": 1,
        "run_dir": tmp_path / "run",
        "device": "cpu",
    }
    return Trainer(**{**defaults, **knobs})


def plainly(model: nn.Linear, steps: int, batch: int = 8) -> list[float]:
    """The same training written out: plain torch over the documented order of samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        epoch, at = divmod(step * batch, 48)
        ids = epoch_order(48, seed=0, epoch=epoch, shuffle=True)[at : at + batch]
        optimizer.zero_grad()
        loss = F.mse_loss(model(X[ids]), Y[ids])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fresh_model(tmp_path: Path) -> nn.Linear:
    """The model as a run of ours begins with it: frozen by a rate of nothing."""
    still = Line()
    still.optimizer = OptimizerSpec("SGD", lr=0.0)
    result = trainer(tmp_path, task=still, max_steps=1, run_dir=tmp_path / "still").fit()
    assert isinstance(result.model, nn.Linear)
    return result.model


def test_a_run_equals_plain_torch_step_by_step(tmp_path: Path) -> None:
    recorder = Recorder()
    result = trainer(tmp_path, callbacks=[recorder]).fit()
    model = fresh_model(tmp_path)
    expected = plainly(model, 10)
    assert [r.metrics["loss"] for r in recorder.steps if r.metrics] == pytest.approx(expected)
    torch.testing.assert_close(result.model.state_dict(), model.state_dict())


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    whole = trainer(tmp_path, run_dir=tmp_path / "a").fit()
    cut = trainer(tmp_path, run_dir=tmp_path / "b", accumulate=4).fit()
    torch.testing.assert_close(cut.model.state_dict(), whole.model.state_dict())


def test_a_report_is_the_mean_over_the_batches_since_the_last_one(tmp_path: Path) -> None:
    each, third = Recorder(), Recorder()
    trainer(tmp_path, callbacks=[each], run_dir=tmp_path / "a").fit()
    trainer(tmp_path, callbacks=[third], run_dir=tmp_path / "b", log_every=3).fit()
    losses = [r.metrics["loss"] for r in each.steps if r.metrics]
    told = {r.step: r.metrics["loss"] for r in third.steps if r.metrics}
    assert sorted(told) == [1, 3, 6, 9, 10]
    assert told[6] == pytest.approx(sum(losses[3:6]) / 3)


def test_the_schedule_sets_the_rate_before_each_update(tmp_path: Path) -> None:
    recorder = Recorder()
    schedule = Linear(warmup_steps=4)
    trainer(tmp_path, schedule=schedule, callbacks=[recorder]).fit()
    rates = [r.metrics["lr"] for r in recorder.steps if r.metrics]
    assert rates == pytest.approx([0.05 * schedule.factor(i, 10) for i in range(10)])


def test_clipping_bounds_the_step_and_reports_the_norm_before_it(tmp_path: Path) -> None:
    recorder = Recorder()
    before = fresh_model(tmp_path)
    result = trainer(tmp_path, max_steps=1, max_grad_norm=0.5, callbacks=[recorder]).fit()
    ids = epoch_order(48, seed=0, epoch=0, shuffle=True)[:8]
    F.mse_loss(before(X[ids]), Y[ids]).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(before.parameters(), 0.5))
    with torch.no_grad():
        for parameter in before.parameters():
            parameter -= 0.05 * parameter.grad
    assert norm > 0.5
    assert recorder.steps[0].metrics["grad_norm"] == pytest.approx(norm)
    torch.testing.assert_close(result.model.state_dict(), before.state_dict())


def test_clipping_by_value_bounds_each_element(tmp_path: Path) -> None:
    before = fresh_model(tmp_path)
    result = trainer(tmp_path, max_steps=1, max_grad_value=0.01).fit()
    ids = epoch_order(48, seed=0, epoch=0, shuffle=True)[:8]
    F.mse_loss(before(X[ids]), Y[ids]).backward()
    torch.nn.utils.clip_grad_value_(before.parameters(), 0.01)
    with torch.no_grad():
        for parameter in before.parameters():
            parameter -= 0.05 * parameter.grad
    torch.testing.assert_close(result.model.state_dict(), before.state_dict())


def test_epochs_bound_a_run_and_are_evaluated_at_their_ends(tmp_path: Path) -> None:
    recorder = Recorder()
    result = trainer(tmp_path, max_steps=None, max_epochs=2, callbacks=[recorder]).fit()
    assert result.content["steps"] == 12
    assert [e.step for e in recorder.evaluations] == [6, 12]


def test_steps_between_evaluations_are_kept_and_the_end_is_evaluated_too(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer(tmp_path, eval_every=4, eval_every_epochs=None, callbacks=[recorder]).fit()
    assert [e.step for e in recorder.evaluations] == [4, 8, 10]


def test_an_evaluation_is_the_mean_over_all_samples_of_the_split(tmp_path: Path) -> None:
    result = trainer(tmp_path, loading=Loading(batch_size=8, eval_batch_size=3)).fit()
    with torch.no_grad():
        expected = F.mse_loss(result.model(X[:10]), Y[:10]).item()
    assert result.metrics["loss"] == pytest.approx(expected)


def test_time_bounds_a_run(tmp_path: Path) -> None:
    result = trainer(tmp_path, max_steps=None, max_time="0.2s").fit()
    assert result.content["steps"] >= 1


def test_a_callback_can_stop_a_run(tmp_path: Path) -> None:
    class Enough(Callback):
        def on_step(self, report: StepReport) -> bool:
            return report.step == 3

    assert trainer(tmp_path, callbacks=[Enough()]).fit().content["steps"] == 3


class Poisoned(Line):
    """Its loss is not a number at the steps given (one call a step)."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self.bad, self.calls = bad, 0

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        if outputs.requires_grad:
            self.calls += 1
            if self.calls in self.bad:
                return loss * math.nan
        return loss


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(TrainingError, match="first at step 7") as caught:
        trainer(tmp_path, task=Poisoned(7), log_every=5, callbacks=[recorder]).fit()
    assert caught.value.exit_code == 3
    assert recorder.errors == [caught.value]
    assert recorder.saves == []
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert told["error"]["type"] == "TrainingError"


def test_what_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    options = CheckpointOptions(every_steps=3)
    recorder = Recorder()
    with pytest.raises(TrainingError, match="step 5"):
        trainer(
            tmp_path, task=Poisoned(5), log_every=100, checkpoint=options, callbacks=[recorder]
        ).fit()
    assert [s.step for s in recorder.saves] == [3]


def test_skipping_leaves_the_parameters_alone_and_counts(tmp_path: Path) -> None:
    recorder = Recorder()
    result = trainer(tmp_path, task=Poisoned(4, 5), on_nonfinite="skip", callbacks=[recorder]).fit()
    assert result.content["steps"] == 10
    assert result.content["updates"] == 8
    assert recorder.steps[-1].metrics["skipped"] == 2
    assert all(bool(torch.isfinite(p).all()) for p in result.model.parameters())


def test_skipping_for_ever_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="in a row"):
        trainer(tmp_path, task=Poisoned(*range(1, 500)), on_nonfinite="skip", max_steps=400).fit()


def test_continuing_goes_on_through_what_is_not_finite(tmp_path: Path) -> None:
    result = trainer(tmp_path, task=Poisoned(4), on_nonfinite="continue").fit()
    assert result.content["steps"] == 10


def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path: Path) -> None:
    class Impatient(Callback):
        def on_step(self, report: StepReport) -> None:
            if report.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    recorder = Recorder()
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, callbacks=[Impatient(), recorder]).fit()
    assert caught.value.cause_exit_code == 143
    assert [s.step for s in recorder.saves] == [4]
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


def test_a_run_that_stopped_continues_as_if_it_had_not(tmp_path: Path) -> None:
    task = Line()
    task.optimizer = OptimizerSpec("AdamW", lr=0.05)
    whole = trainer(tmp_path, task=task, max_steps=9, run_dir=tmp_path / "whole").fit()
    schedule_total = trainer(tmp_path, task=task, max_steps=5)
    schedule_total.fit()
    resumed = trainer(tmp_path, task=task, max_steps=9).fit()
    assert resumed.content["steps"] == 9
    assert resumed.content["samples"] == 72
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_dropout_model_draws_the_same_units_after_a_resume(tmp_path: Path) -> None:
    class Dropping(Line):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 1))

    whole = trainer(tmp_path, task=Dropping(), run_dir=tmp_path / "whole").fit()
    trainer(tmp_path, task=Dropping(), max_steps=5).fit()
    resumed = trainer(tmp_path, task=Dropping()).fit()
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_resuming_from_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    options = CheckpointOptions(resume=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nothing is there"):
        trainer(tmp_path, checkpoint=options).fit()


def test_the_average_is_what_an_evaluation_uses_and_training_goes_on_without_it(
    tmp_path: Path,
) -> None:
    plain = trainer(tmp_path, run_dir=tmp_path / "a").fit()
    averaged = trainer(tmp_path, run_dir=tmp_path / "b", ema_decay=0.9).fit()
    torch.testing.assert_close(averaged.model.state_dict(), plain.model.state_dict())
    assert averaged.metrics["loss"] != pytest.approx(plain.metrics["loss"])


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    before = fresh_model(tmp_path)
    result = trainer(tmp_path, frozen=("bias",)).fit()
    assert torch.equal(result.model.bias, before.bias)
    assert not torch.equal(result.model.weight, before.weight)


def test_freezing_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing in the model requires a gradient"):
        trainer(tmp_path, frozen=("*",)).fit()


def test_a_rehearsal_runs_one_step_of_each_and_saves_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    result = trainer(tmp_path, fast_dev_run=True, max_steps=None, callbacks=[recorder]).fit()
    assert result.content["steps"] == 1
    assert len(recorder.evaluations) == 1
    assert recorder.saves == []


def test_overfitting_sees_the_first_batches_only(tmp_path: Path) -> None:
    class Counting(Dataset):
        seen: set[int] = set()  # noqa: RUF012 - what the class is for

        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.seen.add(index)
            return X[index], Y[index]

    trainer(tmp_path, task=Line(Source(Counting())), overfit_batches=2).fit()
    assert Counting.seen == set(range(16))


def test_predictions_are_written_in_the_order_of_the_split(tmp_path: Path) -> None:
    data = Source(predict=TensorDataset(X))
    result = trainer(tmp_path, task=Line(data), stages=("fit", "predict")).fit()
    with torch.no_grad():
        expected = result.model(X)
    torch.testing.assert_close(torch.load(tmp_path / "run" / "predictions.pt"), expected)


def test_a_test_stage_reports_its_split_under_its_name(tmp_path: Path) -> None:
    data = Source(test=TensorDataset(X[20:30], Y[20:30]))
    fitted = trainer(tmp_path, task=Line(data), stages=("fit", "test")).fit()
    with torch.no_grad():
        expected = F.mse_loss(fitted.model(X[20:30]), Y[20:30]).item()
    assert fitted.metrics["test_loss"] == pytest.approx(expected)
    again = trainer(tmp_path, task=Line(data), run_dir=tmp_path / "again")
    assert again.test(fitted.checkpoint).metrics["test_loss"] == pytest.approx(expected)


def test_a_stream_is_trained_on_in_its_own_order(tmp_path: Path) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    recorder = Recorder()
    result = trainer(
        tmp_path,
        task=Line(Source(Stream())),
        max_steps=None,
        max_epochs=2,
        loading=Loading(batch_size=10),
        callbacks=[recorder],
    ).fit()
    assert result.content["samples"] == 96
    assert result.content["steps"] == 10
    model = fresh_model(tmp_path)
    first = F.mse_loss(model(X[:10]), Y[:10]).item()
    assert recorder.steps[0].metrics["loss"] == pytest.approx(first)


def test_loader_processes_change_nothing(tmp_path: Path) -> None:
    here = trainer(tmp_path, run_dir=tmp_path / "a").fit()
    there = trainer(
        tmp_path, run_dir=tmp_path / "b", loading=Loading(batch_size=8, num_workers=2)
    ).fit()
    torch.testing.assert_close(there.model.state_dict(), here.model.state_dict(), rtol=0, atol=0)


class Weighted(Line):
    """The loss counts only the first ``n`` of a batch, ``n`` from its own features."""

    sample_weight = None

    def weight(self, batch: Any) -> float:
        return float((batch[0][:, 0] > 0).sum())

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        mask = (batch[0][:, 0] > 0).float().unsqueeze(1)
        return ((outputs - batch[1]) ** 2 * mask).sum() / mask.sum().clamp(min=1.0)


def test_unequal_weights_make_the_same_gradient_however_the_batch_is_cut(tmp_path: Path) -> None:
    whole = trainer(tmp_path, task=Weighted(), run_dir=tmp_path / "a").fit()
    cut = trainer(tmp_path, task=Weighted(), run_dir=tmp_path / "b", accumulate=8).fit()
    torch.testing.assert_close(cut.model.state_dict(), whole.model.state_dict())
    assert cut.content["train_loss"] == pytest.approx(whole.content["train_loss"], rel=1e-5)


def test_a_loss_that_is_no_scalar_is_refused(tmp_path: Path) -> None:
    class Wide(Line):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return (outputs - batch[1]) ** 2

    with pytest.raises(ConfigError, match=r"\(8, 1\), not a scalar"):
        trainer(tmp_path, task=Wide()).fit()


def test_a_loss_without_a_gradient_is_refused(tmp_path: Path) -> None:
    class Cut(Line):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return super().loss(outputs, batch).detach()

    with pytest.raises(ConfigError, match="without a gradient"):
        trainer(tmp_path, task=Cut()).fit()


def test_data_smaller_than_a_global_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="48 samples, and one global batch takes 64"):
        trainer(tmp_path, loading=Loading(batch_size=64)).fit()


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"max_steps": None}, "nothing says when training ends"),
        ({"max_steps": 0}, r"trainer\.max_steps=0"),
        ({"log_every": 0}, r"trainer\.log_every=0"),
        ({"max_time": "soon"}, r"trainer\.max_time"),
        ({"stages": ("fly",)}, r"trainer\.stages"),
        ({"ema_decay": 1.5}, "ema_decay"),
        ({"strategy": "ddpp"}, "did you mean 'ddp'"),
        ({"strategy": "dp"}, "strategy=ddp"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
)
def test_bad_knobs_are_refused_with_a_next_move(tmp_path: Path, knobs: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, **knobs).fit()


def test_the_learning_rate_finder_suggests_a_rate_that_trains(tmp_path: Path) -> None:
    recorder = Recorder()
    found = trainer(tmp_path, stages=("find_lr",), callbacks=[recorder]).fit()
    finder = found.content["lr_finder"]
    assert finder["rates"][0] < finder["suggestion"] < finder["rates"][-1]
    task = Line()
    task.optimizer = OptimizerSpec("SGD", lr=finder["suggestion"])
    result = trainer(tmp_path, task=task, run_dir=tmp_path / "b", max_steps=30).fit()
    first = F.mse_loss(fresh_model(tmp_path)(X), Y).item()
    assert result.metrics["loss"] < first


def test_the_batch_size_finder_tries_sizes_up_to_the_data(tmp_path: Path, capfd) -> None:
    found = trainer(tmp_path, stages=("find_batch_size",)).fit()
    finder = found.content["batch_size_finder"]
    assert [t["micro_batch_size"] for t in finder["trials"]] == [1, 2, 4, 8, 16, 32]
    assert (finder["largest"], finder["limit"]) == (32, "data")
    assert found.content["steps"] == 0
    said = capfd.readouterr().out
    assert "32 fits, and the training data has no more for twice as many" in said
    assert "largest that fits" not in said


def test_pretrained_weights_are_what_training_starts_from(tmp_path: Path) -> None:
    weights = {"weight": torch.arange(6.0).unsqueeze(0), "bias": torch.zeros(1)}
    torch.save(weights, tmp_path / "weights.pt")
    recorder = Recorder()
    trainer(tmp_path, pretrained=str(tmp_path / "weights.pt"), callbacks=[recorder]).fit()
    assert recorder.steps[0].metrics["loss"] == pytest.approx(0.0, abs=1e-9)


def test_compiling_changes_nothing_but_rounding(tmp_path: Path) -> None:
    eager = trainer(tmp_path, run_dir=tmp_path / "a").fit()
    compiled = trainer(
        tmp_path, run_dir=tmp_path / "b", compile=True, compile_options={"backend": "aot_eager"}
    ).fit()
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict())


def test_a_resumed_run_takes_the_learning_rate_that_it_is_given(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=5).fit()
    task = Line()
    task.optimizer = OptimizerSpec("SGD", lr=0.001)
    recorder = Recorder()
    trainer(tmp_path, task=task, callbacks=[recorder]).fit()
    assert [r.step for r in recorder.steps] == [6, 7, 8, 9, 10]
    assert {r.metrics["lr"] for r in recorder.steps} == {0.001}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_arrives_as_the_sentence_that_it_is(
    tmp_path: Path, workers: int
) -> None:
    class Torn(Dataset):
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            raise ConfigError(f"sample {index} is torn", fix="mend it")

    loading = Loading(batch_size=8, num_workers=workers)
    with pytest.raises(ConfigError, match=r"^sample \d+ is torn; mend it$"):
        trainer(tmp_path, task=Line(Source(Torn())), loading=loading).fit()


def test_deterministic_algorithms_are_on_within_the_run_and_off_after_it(tmp_path: Path) -> None:
    seen = []

    class Looking(Callback):
        def on_start(self, info: RunInfo) -> None:
            seen.append(torch.are_deterministic_algorithms_enabled())

    trainer(tmp_path, deterministic=True, callbacks=[Looking()], max_steps=1).fit()
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
