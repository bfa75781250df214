"""A run goes on with the samples that it began with, or is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset, random_split

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.training.trainer import run_in

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))


class Line(Task):
    optimizer = OptimizerSpec("SGD", lr=0.05)

    def __init__(self, train: Any) -> None:
        self.data = DataSource()
        self.data.train = train

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


def pairs(x: Tensor = X) -> TensorDataset:
    return TensorDataset(x, x.sum(1, keepdim=True))


class Augmented(Dataset[Any]):
    """Draws from torch and NumPy, which the run seeds; ``own`` from a generator of its own."""

    def __init__(self, own: Any = None) -> None:
        self.own, self.reads = own, 0

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        noise = torch.randn(3) + float(numpy.random.rand())  # noqa: NPY002
        if self.own is not None:
            noise = noise + float(self.own.standard_normal())
        return X[index] + noise, X[index].sum(0, keepdim=True)


class Stream(IterableDataset[Any]):
    def __init__(self, begin: int) -> None:
        self.begin = begin

    def __iter__(self) -> Any:
        return iter(list(pairs())[self.begin : self.begin + 20])


def trainer_of(task: Task, folder: Path, steps: int, strategy: str, **knobs: Any) -> Trainer:
    options = {"checkpoint": {}, "loading": {}, "seed": 0, **knobs}
    return Trainer(
        task=task,
        strategy=strategy,
        loading=Loading(batch_size=8, **options["loading"]),
        max_steps=steps,
        run_dir=folder / f"run{steps}",
        checkpoint=CheckpointOptions(dir=str(folder / "saved"), **options["checkpoint"]),
        seed=options["seed"],
        device="cpu",
    )


def fit(task: Task, folder: Path, steps: int, **knobs: Any) -> Any:
    return trainer_of(task, folder, steps, "single", **knobs).fit()


def test_other_samples_of_the_same_number_are_refused_by_number(tmp_path):
    fit(Line(pairs()), tmp_path, 2)
    other = X.clone()
    other[39] += 0.01
    with pytest.raises(ConfigError, match=r"sample 39 of data\.train is another than it was") as e:
        fit(Line(pairs(other)), tmp_path, 4)
    assert "checkpoint.allow=[data]" in str(e.value)
    fit(Line(pairs(other)), tmp_path, 4, checkpoint={"allow": ("data",)})


def test_the_same_samples_go_on(tmp_path):
    fit(Line(pairs()), tmp_path, 2)
    fit(Line(pairs()), tmp_path, 4)
    fit(Line(pairs()), tmp_path, 6, loading={"num_workers": 1})


def test_a_split_made_anew_is_seen(tmp_path):
    def split(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return random_split(pairs(), [30, 10], generator=generator)[0]

    fit(Line(split(0)), tmp_path, 2)
    fit(Line(split(0)), tmp_path, 3)
    with pytest.raises(ConfigError, match="is another than it was"):
        fit(Line(split(1)), tmp_path, 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_of_the_same_samples_goes_on(workers, tmp_path):
    for steps in (2, 4):
        fit(Line(Augmented()), tmp_path, steps, loading={"num_workers": workers})
    fit(Line(Augmented()), tmp_path, 6, seed=1, checkpoint={"allow": ("seed",)})


@pytest.mark.parametrize("workers", [0, 1])
def test_draws_that_nobody_seeds_are_told_and_go_on(workers, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        for steps in (2, 4):
            task = Line(Augmented(numpy.random.default_rng(steps)))
            fit(task, tmp_path, steps, loading={"num_workers": workers})
    assert any("whether they are those of the checkpoint" in r.getMessage() for r in caplog.records)


def test_streams_are_not_read(tmp_path):
    fit(Line(Stream(0)), tmp_path, 1)
    fit(Line(Stream(20)), tmp_path, 2)


def test_looking_at_samples_does_not_disturb_the_dataset_of_the_run(tmp_path):
    dataset = Augmented()
    fit(Line(dataset), tmp_path, 2)
    assert dataset.reads == 16


def on_rank(world: World, folder: Path, shift: float, steps: int) -> str:
    try:
        run_in(world, trainer_of(Line(pairs(X + shift)), folder, steps, "ddp"))
    except TorshError as error:
        return str(error)
    return ""


def test_two_processes_refuse_what_one_has_saved_of_other_samples(tmp_path):
    fit(Line(pairs()), tmp_path, 2)
    with RankPool(2, join=False) as ranks:
        assert ranks.run(on_rank, tmp_path, 0.0, 3) == ["", ""]
        for answer in ranks.run(on_rank, tmp_path, 1.0, 4):
            assert "sample 39 of data.train is another than it was" in answer
