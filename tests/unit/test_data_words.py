"""What is said of samples that do not fit together, of a loss that is a number, of Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset

from torsh_trainer import Callback, DataSource, Loading, Task, Trainer
from torsh_trainer.errors import ConfigError, Interrupted
from torsh_trainer.tasks.collating import stack

WORKERS = pytest.mark.parametrize("workers", [0, 1], ids=["here", "by a worker"])


class Uneven(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(3 + index % 3), index


class UnevenStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Uneven()[index] for index in range(8))


class Source(DataSource):
    def __init__(self, train: Any) -> None:
        self.train = train


class Padding(Source):
    def collate(self, samples: list[Any]) -> Any:  # type: ignore[override]
        rows, numbers = zip(*samples, strict=True)
        return pad_sequence(list(rows), batch_first=True), torch.tensor(numbers)


class Sums(Task):
    def __init__(self, data: DataSource) -> None:
        self.data = data

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].sum(1, keepdim=True))

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return outputs.square().mean()


def fit(task: Task, folder: Path, *, workers: int = 0, **given: Any) -> None:
    loading = Loading(batch_size=4, num_workers=workers)
    knobs = {"max_steps": 2, "run_dir": folder, "default_callbacks": False, "loading": loading}
    Trainer(task=task, **{**knobs, **given}).fit()


@WORKERS
@pytest.mark.parametrize("dataset", [Uneven(), UnevenStream()], ids=["map", "stream"])
def test_samples_of_unequal_length_name_their_shapes_and_collate(
    tmp_path: Path, workers: int, dataset: Any
) -> None:
    with pytest.raises(ConfigError, match="samples of a batch cannot be stacked") as caught:
        fit(Sums(Source(dataset)), tmp_path, workers=workers)
    assert "sample[0] has shape (" in caught.value.sentence
    assert "collate(samples)" in caught.value.fix


@WORKERS
def test_a_collate_that_pads_trains(tmp_path: Path, workers: int) -> None:
    fit(Sums(Padding(Uneven())), tmp_path, workers=workers)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([torch.ones(3), torch.ones(5)], r"sample has shape \(3,\) and shape \(5,\)"),
        ([numpy.ones((2, 3)), numpy.ones((2, 4))], r"shape \(2, 3\) and shape \(2, 4\)"),
        ([[1, 2], [1, 2, 3]], "sample has 2 items and 3 items"),
        ([{"x": 1}, {"y": 1}], "sample has the keys x and the keys y"),
        ([{"x": torch.ones(2)}, {"x": None}], r"sample\['x'\] has shape \(2,\) and type NoneType"),
        ([object(), object()], "torch makes no batch of these samples: .*found <class 'object'>"),
    ],
)
def test_what_differs_between_samples_is_named(samples: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stack(samples)


def test_many_shapes_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"the 9 samples .* and 5 others"):
        stack([torch.ones(size) for size in range(1, 10)])


class Dropping(Padding):
    """Leaves out every sample that begins at an odd number."""

    def collate(self, samples: list[Any]) -> Any:  # type: ignore[override]
        return super().collate([sample for sample in samples if sample[1] % 2 == 0])


class TimeFirst(Padding):
    def collate(self, samples: list[Any]) -> Any:  # type: ignore[override]
        rows, numbers = zip(*samples, strict=True)
        return pad_sequence([row[:3] for row in rows]), torch.tensor(numbers)


class Counting(Sums):
    sample_weight = None

    def weight(self, batch: Any) -> float:
        return float(len(batch[0]))


WHOLE = {"loading": Loading(batch_size=8), "max_steps": 1}


@pytest.mark.parametrize("weight", [1.0, None])
def test_a_collate_that_leaves_samples_out_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weight: float | None
) -> None:
    task = Sums(Dropping(Uneven()))
    task.sample_weight = weight
    fit(task, tmp_path, **WHOLE | {"max_steps": 3})
    told = [record.message for record in caplog.records if "collate gave" in record.message]
    assert len(told) == 1
    assert told[0].startswith("collate gave 4 rows for 8 samples")
    assert "set sample_weight = None" in told[0]


@pytest.mark.parametrize("task", [Counting(Dropping(Uneven())), Sums(TimeFirst(Uneven()))])
def test_nothing_is_said_where_they_are_counted_or_lie_in_another_dimension(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, task: Task
) -> None:
    fit(task, tmp_path, **WHOLE)
    assert "collate gave" not in caplog.text


# -- what a task returns --------------------------------------------------------------------------


class Item(Sums):
    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return outputs.square().mean().item()


@pytest.mark.parametrize("knobs", [{}, {"accumulate": 2}, {"strategy": "fsdp"}], ids=str)
def test_a_loss_that_was_made_a_number_is_refused_in_words(tmp_path: Path, knobs: Any) -> None:
    with pytest.raises(ConfigError, match=r"returned a float, .* without \.item\(\)"):
        fit(Item(Padding(Uneven())), tmp_path, **knobs)


# -- signals --------------------------------------------------------------------------------------


class PressingCtrlC(Callback):
    def on_step(self, report: Any) -> None:
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_called_so(tmp_path: Path) -> None:
    task = Sums(Padding(Uneven()))
    with pytest.raises(Interrupted, match=r"stopped by Ctrl-C \(SIGINT\) after step 2; checkpoint"):
        fit(task, tmp_path, max_steps=100, callbacks=[PressingCtrlC()])
