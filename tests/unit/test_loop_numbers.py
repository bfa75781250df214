"""Numbers that would be wrong without a word: what is not finite, not counted, not the model's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import (
    Callback,
    CheckpointOptions,
    DataSource,
    Loading,
    Mean,
    OptimizerSpec,
    Task,
    Trainer,
)
from torsh_trainer.callbacks.base import StepReport
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.data.sampler import epoch_order
from torsh_trainer.errors import ConfigError, TrainingError
from torsh_trainer.tasks.base import sum_of

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.arange(6.0)).unsqueeze(1)


class Source(DataSource):
    train = TensorDataset(X, Y)
    eval = TensorDataset(X[:10], Y[:10])


class Line(Task):
    data = Source()
    optimizer = OptimizerSpec("SGD", lr=0.05)

    def build_model(self) -> nn.Module:
        return nn.Linear(6, 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


def trainer(tmp_path: Path, **knobs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "task": Line(),
        "strategy": "single",
        "loading": Loading(batch_size=8),
        "max_steps": 10,
        "run_dir": tmp_path / "run",
        "device": "cpu",
    }
    return Trainer(**{**defaults, **knobs})


def saved(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))


# -- gradients that are not finite, below a finite loss ------------------------------------------


class Edge(Line):
    """In one step the loss is finite and its gradient is not: a square root at 0."""

    def __init__(self, bad: int) -> None:
        self.bad, self.calls = bad, 0

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        if outputs.requires_grad:
            self.calls += 1
            if self.calls == self.bad:
                return loss + (outputs * 0).sum().sqrt()
        return loss


@pytest.mark.parametrize("log_every", [1, 100])
def test_the_last_step_may_not_leave_weights_that_are_not_finite(tmp_path, log_every) -> None:
    with pytest.raises(TrainingError, match="weights are not finite after step 10") as caught:
        trainer(tmp_path, task=Edge(10), log_every=log_every).fit()
    assert caught.value.exit_code == 3
    assert saved(tmp_path) == []


def test_nor_where_nothing_is_saved(tmp_path) -> None:
    options = CheckpointOptions(at_end=False)
    with pytest.raises(TrainingError, match="weights are not finite after step 10"):
        trainer(tmp_path, task=Edge(10), checkpoint=options, eval_every_epochs=None).fit()


def test_no_checkpoint_holds_them_and_the_one_before_goes_on(tmp_path) -> None:
    options = CheckpointOptions(every_steps=3)
    knobs: dict[str, Any] = {"checkpoint": options, "log_every": 100, "eval_every_epochs": None}
    with pytest.raises(TrainingError, match="weights are not finite after step 6"):
        trainer(tmp_path, task=Edge(6), **knobs).fit()
    assert saved(tmp_path) == ["step-00000003"]


def test_going_on_through_it_is_said_where_it_is_saved(tmp_path, caplog) -> None:
    trainer(tmp_path, task=Edge(10), on_nonfinite="continue", log_level="warning").fit()
    assert "the weights are not finite after step 10" in caplog.text
    assert saved(tmp_path) == ["step-00000010"]


# -- reports --------------------------------------------------------------------------------------


class Losses(Callback):
    def __init__(self) -> None:
        self.told: dict[int, float] = {}

    def on_step(self, report: StepReport) -> None:
        if report.metrics:
            self.told[report.step] = report.metrics["loss"]


class Poisoned(Edge):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = Line.loss(self, outputs, batch)
        self.calls += outputs.requires_grad
        return loss * math.nan if outputs.requires_grad and self.calls == self.bad else loss


def test_a_report_of_skipped_steps_alone_tells_no_older_loss(tmp_path) -> None:
    losses = Losses()
    knobs: dict[str, Any] = {"on_nonfinite": "skip", "log_every": 1}
    trainer(tmp_path, task=Poisoned(4), callbacks=[losses, Jsonl()], **knobs).fit()
    assert [step for step, loss in losses.told.items() if math.isnan(loss)] == [4]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == "train"]
    assert [row["step"] for row in rows if row["loss"] is None] == [4]


# -- evaluation -----------------------------------------------------------------------------------


class Masked(Line):
    """A mean over the samples whose target counts: 0/0 where none does."""

    sample_weight = None

    class Source(DataSource):
        train = TensorDataset(X, Y, torch.ones(48))
        eval = TensorDataset(X[:12], Y[:12], torch.tensor([1.0] * 6 + [0.0] * 6))

    data = Source()

    def weight(self, batch: Any) -> float:
        return float(batch[2].sum())

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return ((outputs - batch[1]).square().squeeze(1) * batch[2]).sum() / batch[2].sum()


def test_a_batch_that_weighs_nothing_leaves_a_metric_alone(tmp_path) -> None:
    loading = Loading(batch_size=8, eval_batch_size=3)
    result = trainer(tmp_path, task=Masked(), loading=loading).fit()
    with torch.no_grad():
        expected = F.mse_loss(result.model(X[:6]), Y[:6]).item()
    assert result.metrics["loss"] == pytest.approx(expected)


def test_a_metric_that_is_no_sum_and_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="float for 'accuracy'"):
        sum_of("accuracy", [0.5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"shape \(3,\) in the Mean of 'accuracy'"):
        sum_of("accuracy", [Mean(torch.ones(3), 3)])


class Sequences(Line):
    """Batches (time, samples, features), as recurrent networks like them."""

    class Source(DataSource):
        train = TensorDataset(X.view(12, 4, 6), Y.view(12, 4, 1))
        eval = TensorDataset(X.view(12, 4, 6)[:5], Y.view(12, 4, 1)[:5])

        @staticmethod
        def collate(samples: list[Any]) -> Any:
            return [torch.stack(part, 1) for part in zip(*samples, strict=True)]

    data = Source()


def test_samples_are_counted_by_the_loader_and_not_by_a_shape(tmp_path) -> None:
    loading = Loading(batch_size=4, eval_batch_size=3)
    result = trainer(tmp_path, task=Sequences(), loading=loading).fit()
    inputs, targets = Sequences.Source.eval.tensors
    with torch.no_grad():
        expected = F.mse_loss(result.model(inputs), targets).item()
    assert result.metrics["loss"] == pytest.approx(expected)


# -- losses that broadcast ------------------------------------------------------------------------


def test_a_loss_that_would_broadcast_is_refused(tmp_path) -> None:
    class Pairs(Line):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return F.mse_loss(outputs, batch[1][:, 0])

    with pytest.raises(ConfigError, match=r"would broadcast.*\[8\].*\[8, 1\].*squeeze"):
        trainer(tmp_path, task=Pairs()).fit()


# -- parameters outside the model -----------------------------------------------------------------


class Scaled(Line):
    """The loss has a parameter of its own."""

    def __init__(self, *, stepped: bool = False, frozen: bool = False) -> None:
        self.criterion = nn.Linear(1, 1)
        self.criterion.requires_grad_(not frozen)
        self.stepped = stepped

    def build_optimizers(self, named_parameters: Any) -> Any:
        mine = list(self.criterion.parameters()) if self.stepped else []
        return {"main": torch.optim.SGD([*(p for _, p in named_parameters), *mine], lr=0.05)}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(self.criterion(outputs), batch[1])


def test_a_trained_parameter_of_the_loss_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"gradient for task\.criterion\.weight"):
        trainer(tmp_path, task=Scaled()).fit()
    assert saved(tmp_path) == []


def test_so_is_one_that_an_optimizer_would_step(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"'main' has task\.criterion\.weight"):
        trainer(tmp_path, task=Scaled(stepped=True)).fit()


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, lambda optimizer: [optimizer]])
def test_optimizers_without_a_name_are_refused_in_words(tmp_path, wrap: Any) -> None:
    class Bare(Line):
        def build_optimizers(self, named_parameters: Any) -> Any:
            return wrap(torch.optim.SGD([p for _, p in named_parameters], lr=0.05))

    with pytest.raises(ConfigError, match=r'not a mapping of optimizers; return \{"main": opt'):
        trainer(tmp_path, task=Bare()).fit()


CENTRE = nn.Parameter(torch.zeros(1))


def test_so_is_a_global_one(tmp_path) -> None:
    class Global(Line):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return F.mse_loss(outputs + CENTRE, batch[1])

    with pytest.raises(ConfigError, match=r"gradient for .*\.CENTRE"):
        trainer(tmp_path, task=Global()).fit()


def test_a_frozen_one_and_one_of_the_model_train_as_in_plain_torch(tmp_path) -> None:
    frozen = Scaled(frozen=True)
    result = trainer(tmp_path, task=frozen, max_steps=4, eval_every_epochs=None).fit()
    still = trainer(tmp_path, task=Line(), max_steps=1, run_dir=tmp_path / "still")
    still.task.optimizer = OptimizerSpec("SGD", lr=0.0)
    model = still.fit().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        ids = epoch_order(48, seed=0, epoch=0, shuffle=True)[8 * step : 8 * step + 8]
        optimizer.zero_grad()
        F.mse_loss(frozen.criterion(model(X[ids])), Y[ids]).backward()
        optimizer.step()
    torch.testing.assert_close(result.model.state_dict(), model.state_dict())


def test_a_model_that_the_task_holds_too_is_the_model(tmp_path) -> None:
    class Holds(Line):
        def __init__(self) -> None:
            self.model = nn.Linear(6, 1)

        def build_model(self) -> nn.Module:
            return self.model

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return F.mse_loss(outputs, batch[1]) + 0.1 * self.model.weight.square().sum()

    assert trainer(tmp_path, task=Holds()).fit().content["steps"] == 10


# -- weights of batches and of samples ------------------------------------------------------------


@pytest.mark.parametrize("wrong", [math.nan, -4.0])
def test_a_weight_that_is_none_is_refused(tmp_path, wrong: float) -> None:
    class Heavy(Line):
        sample_weight = None

        def weight(self, batch: Any) -> float:
            return wrong if bool((batch[0] == X[0]).all(1).any()) else 8.0

    with pytest.raises(ConfigError, match="negative number or NaN"):
        trainer(tmp_path, task=Heavy(), loading=Loading(batch_size=48, micro_batch_size=8)).fit()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (torch.ones(7), "has 7 weights for 48 training samples"),
        (torch.ones(60), "has 60 weights for 48 training samples"),
        (torch.ones(48, 1), r"has shape \(48, 1\)"),
        (torch.zeros(48), "are all 0"),
        (torch.tensor([1.0] * 5 + [-1.0] + [1.0] * 42), "gives sample 5 the weight -1"),
        (torch.tensor([1.0] * 5 + [math.nan] + [1.0] * 42), "gives sample 5 the weight nan"),
        (torch.ones(48, dtype=torch.complex64), "has dtype complex64"),
        ("equal", "returned a str"),
        (None, "gives no sample weights"),
    ],
)
def test_sample_weights_that_do_not_fit_are_refused(tmp_path, weights: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(
            tmp_path, task=weighted(weights), loading=Loading(batch_size=8, weighted=True)
        ).fit()


def test_weights_of_the_first_batches_alone_may_not_all_be_0(tmp_path) -> None:
    task = weighted(torch.tensor([0.0] * 16 + [1.0] * 32))
    loading = Loading(batch_size=8, weighted=True)
    with pytest.raises(ConfigError, match=r"the first sample_weights\(\) .* are all 0"):
        trainer(tmp_path, task=task, loading=loading, overfit_batches=2).fit()


def test_weights_may_be_a_plain_list(tmp_path) -> None:
    loading = Loading(batch_size=8, weighted=True)
    lists, tensors = (
        trainer(tmp_path, task=weighted(weights), loading=loading, run_dir=tmp_path / name).fit()
        for name, weights in (("a", [1.0, 3.0] * 24), ("b", torch.tensor([1.0, 3.0] * 24)))
    )
    torch.testing.assert_close(lists.model.state_dict(), tensors.model.state_dict(), rtol=0, atol=0)


def weighted(weights: Any) -> Task:
    class Weighted(Source):
        def sample_weights(self) -> Any:
            return weights

    task = Line()
    task.data = Weighted()
    return task
