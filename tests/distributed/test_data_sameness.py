"""All processes train on the same data, or none does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset, random_split

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.checkpoint.rng import rng_state
from torsh_trainer.comm import create
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.data.sameness import Reader, check_same_data
from torsh_trainer.environments.world import World
from torsh_trainer.errors import TorshError
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.training.trainer import run_in

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Line(Task):
    optimizer = OptimizerSpec("SGD", lr=0.05)

    def __init__(self, data: DataSource) -> None:
        self.data = data

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


class Given(DataSource):
    def __init__(self, train: Any, evaluation: Any = None, weights: Any = None) -> None:
        self.train, self.eval, self._weights = train, evaluation, weights

    def sample_weights(self) -> Any:
        return self._weights


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, join=False) as pool:
        yield pool


def train(
    world: World, folder: Path, make: Callable[[World], DataSource], knobs: dict[str, Any]
) -> str:
    """What one rank says of a run of two steps over data that it has made itself."""
    torch.manual_seed(world.rank)  # as two interpreters: what nobody seeds is another on each
    random.seed(world.rank)
    numpy.random.seed(world.rank)  # noqa: NPY002 - what users draw from
    trainer = Trainer(
        task=Line(make(world)),
        strategy="ddp",
        loading=Loading(batch_size=8, **knobs),
        max_steps=2,
        run_dir=folder,
        device="cpu",
    )
    try:
        run_in(world, trainer)
    except TorshError as error:
        return str(error)
    return ""


def outcome(
    ranks: RankPool, folder: Path, make: Callable[[World], DataSource], **knobs: Any
) -> str:
    """What all ranks say; they have to agree."""
    first, second = ranks.run(train, folder / "run", make, knobs)
    assert first == second
    return first


def test_a_split_that_each_rank_draws_apart_is_refused_on_all_of_them(ranks, tmp_path) -> None:
    def make(world: World) -> DataSource:
        return Given(*random_split(TensorDataset(X, Y), [51, 13]))

    said = outcome(ranks, tmp_path, make)
    assert said.startswith("sample ")
    assert "of data.train differs between rank 0 and rank 1" in said
    assert "torch.Generator().manual_seed" in said


def test_an_evaluation_split_is_compared_too(ranks, tmp_path) -> None:
    def make(world: World) -> DataSource:
        others = torch.randperm(64)[:13]
        return Given(TensorDataset(X, Y), TensorDataset(X[others], Y[others]))

    assert "of data.eval differs between rank 0 and rank 1" in outcome(ranks, tmp_path, make)


def test_another_number_of_samples_is_refused(ranks, tmp_path) -> None:
    def make(world: World) -> DataSource:
        size = 64 - world.rank
        return Given(TensorDataset(X[:size], Y[:size]))

    said = outcome(ranks, tmp_path, make)
    assert "data.train is 64 samples on rank 0 and 63 samples on rank 1" in said


def test_a_split_that_one_rank_lacks_is_refused(ranks, tmp_path) -> None:
    def make(world: World) -> DataSource:
        whole = TensorDataset(X, Y)
        return Given(whole, whole if world.rank else None)

    assert "data.eval is no dataset on rank 0 and 64 samples" in outcome(ranks, tmp_path, make)


class Lazy(DataSource):
    """Data made at the first access, with draws that nobody seeds."""

    @cached_property
    def _parts(self) -> Any:
        return random_split(TensorDataset(X, Y), [51, 13])

    @property
    def train(self) -> Any:
        return self._parts[0]

    @property
    def eval(self) -> Any:
        return self._parts[1]


class Anew(DataSource):
    """A property that splits at every access, by numpy."""

    @property
    def _order(self) -> Any:
        return numpy.random.permutation(64)  # noqa: NPY002 - what users draw from

    @property
    def train(self) -> Any:
        return TensorDataset(X[self._order[:51]], Y)

    @property
    def eval(self) -> Any:
        return TensorDataset(X[self._order[51:]], Y)


class LazyPairs(Anew):
    @property
    def train(self) -> Any:
        some = self._order[:51]
        return TensorDataset(X[some], Y[some])

    @property
    def eval(self) -> Any:
        some = self._order[51:]
        return TensorDataset(X[some], Y[some])


@pytest.mark.parametrize("kind", [Lazy, LazyPairs])
def test_what_is_made_at_first_access_is_the_same_on_every_rank(ranks, tmp_path, kind) -> None:
    assert outcome(ranks, tmp_path, lambda world: kind()) == ""


class Augmented(Dataset[Any]):
    """Noise from the generator that the run seeds, or from one of the dataset's own."""

    def __init__(self, own: bool) -> None:
        self._own = torch.Generator().manual_seed(torch.randint(99, ()).item()) if own else None

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.randn(4, generator=self._own), Y[index]


@pytest.mark.parametrize("own", [False, True])
def test_augmentation_is_no_difference(ranks, tmp_path, own) -> None:
    assert outcome(ranks, tmp_path, lambda w: Given(Augmented(own))) == ""


class OpenedLate(Augmented):
    """As datasets over a file do it, so that every loader process has a handle of its own."""

    opened = False

    def __getitem__(self, index: int) -> Any:
        self.opened = True
        return super().__getitem__(index)


def test_loader_processes_inherit_nothing_that_the_comparison_has_opened() -> None:
    dataset = OpenedLate(own=False)
    here = Reader(dataset, Loading(), 3).excerpt()
    assert dataset.opened
    dataset.opened = False
    assert Reader(dataset, Loading(num_workers=2), 3).excerpt() == here
    assert not dataset.opened


class Numbered(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


def test_a_stream_is_not_read_before_its_time(ranks, tmp_path) -> None:
    assert outcome(ranks, tmp_path, lambda world: Given(Numbered())) == ""


def test_the_generators_are_left_as_they_were(ranks, tmp_path) -> None:
    def case(world: World, folder: Path) -> bool:
        comm = create(world, CommOptions(timeout_s=60), torch.device("cpu"))
        before = rng_state(comm.device)
        check_same_data(Line(LazyPairs()), ["train", "eval"], Loading(), comm, seed=3)
        after = rng_state(comm.device)
        comm.close()
        same = torch.equal(before.pop("torch"), after.pop("torch"))
        return same and before == after

    assert ranks.run(case, tmp_path) == [True, True]


def test_weights_that_differ_between_ranks_are_refused(ranks, tmp_path) -> None:
    def make(world: World) -> DataSource:
        return Given(TensorDataset(X, Y), weights=torch.ones(64) + world.rank)

    said = outcome(ranks, tmp_path, make, weighted=True)
    assert "sample_weights() of the data source differs between rank 0 and rank 1" in said


CONFIGURED = """
import random
import numpy, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split
from torsh_trainer import DataSource, Task

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))

class Tutorial(DataSource):
    def __init__(self, first: int = 0):
        numbers = torch.arange(first, 64.0)
        whole = TensorDataset(X, numbers, torch.from_numpy(numpy.random.rand(64)))
        self.train, self.eval = random_split(whole, [51, 13])
        self.lucky = random.random()

class Learn(Task):
    def __init__(self, data):
        self.data = data

    def build_model(self):
        return nn.Linear(4, 1)

    def loss(self, outputs, batch):
        return F.mse_loss(outputs[:, 0], batch[1])

    def summarise(self, metrics):
        seen = sorted(self.data.eval.indices)
        for place, index in enumerate(seen):
            metrics[f"sample_{place}"] = float(index)
        return {**metrics, "lucky": self.data.lucky}
"""


def test_a_configured_source_is_made_under_the_seed_of_the_run(warm_door, tmp_path) -> None:
    """The tutorial's random_split in a constructor: one split on both ranks, and in every run."""
    (tmp_path / "tutorial.py").write_text(CONFIGURED)

    def run(name: str, *args: str, processes: int) -> dict[str, float]:
        done = warm_door(
            [
                "+task._target_=tutorial.Learn",
                "+data._target_=tutorial.Tutorial",
                "+data.batch_size=8",
                "trainer.max_steps=2",
                "trainer.device=cpu",
                f"hydra.run.dir={name}",
                "log_level=error",
                *args,
            ],
            processes=processes,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        metrics = json.loads((tmp_path / name / "result.json").read_text())["metrics"]
        return {k: v for k, v in metrics.items() if k.startswith("sample") or k == "lucky"}

    alone = run("alone", "strategy=single", processes=1)
    assert run("again", "strategy=single", processes=1) == alone
    assert run("two", "strategy=ddp", processes=2) == alone
    assert run("other", "strategy=single", "trainer.seed=1", processes=1) != alone
