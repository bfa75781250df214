"""Orders of samples that are computed from the position, and when they are.

tests/data/listed_order was written by the release in which every order was a list: step 3 of 6 of
``Proportion`` below, over ``SIZE`` samples.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from torsh_trainer import CheckpointOptions, DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.by_position import BLOCK, ROUNDS, draws, permutation
from torsh_trainer.data.feed import TrainLoader, eval_batches
from torsh_trainer.data.sampler import LISTED, BatchPartition, GlobalSampler, epoch_order, mix
from torsh_trainer.errors import ConfigError

SIZE = LISTED + 24
LISTED_ORDER = Path(__file__).parents[1] / "data" / "listed_order"
KEYS = 3_000


class Numbers(Dataset[Any]):
    """Samples that say who they are, and take no memory."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index) / SIZE]), index


class Proportion(Task):
    """``seen`` are the samples of each step."""

    def __init__(self, size: int = SIZE) -> None:
        self.data = DataSource()
        self.data.train = Numbers(size)
        self.optimizer = OptimizerSpec("SGD", lr=0.05)
        self.seen: list[list[int]] = []

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.seen.append(batch[1].tolist())
        return nn.functional.mse_loss(outputs, batch[0])


def permuted(size: int, key: int) -> list[int]:
    ids = permutation(size, [mix(key, number) for number in range(ROUNDS)])
    return ids(np.arange(size, dtype=np.uint64)).tolist()


def permuted_by_hand(size: int, key: int, position: int) -> int:
    """Where a position leads, in Python's integers: what checkpoints rely on for good."""
    mask = (1 << 64) - 1

    def hashed(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    bits = (size - 1).bit_length() // 2
    rows = -(-size >> bits)
    while True:
        row, column = position >> bits, position % (1 << bits)
        for number in range(0, 24, 2):
            column = (column + hashed((row + mix(key, number)) & mask)) % (1 << bits)
            drawn = hashed((column + mix(key, number + 1)) & mask) >> rows.bit_length()
            row = (row + (drawn * rows >> (64 - rows.bit_length()))) % rows
        position = (row << bits) + column
        if position < size:
            return position


def surprise(counts: Any, expected: float) -> float:
    """Pearson's chi-square of counts that are all expected alike, in standard deviations."""
    counts = np.asarray(counts, dtype=float)
    freedom = counts.size - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


# -- a permutation --------------------------------------------------------------------------------


def test_every_size_is_permuted() -> None:
    powers = [1 << n for n in range(7, 15)]
    near = [power + off for power in powers for off in (-1, 0, 1)]
    for size in (*range(1, 130), *near, 99_991, LISTED + 1):
        assert sorted(permuted(size, size)) == list(range(size)), size


def test_the_permutation_is_the_one_that_checkpoints_rely_on() -> None:
    for size in (1, 2, 7, 64, 1000, LISTED + 1, 10**12, 2**61 - 1):
        places = sorted({0, size // 3, size // 2, size - 1})
        at = permutation(size, [mix(4, number) for number in range(ROUNDS)])
        found = at(np.array(places, dtype=np.uint64)).tolist()
        assert found == [permuted_by_hand(size, 4, place) for place in places]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_few_are_drawn_as_often(size: int) -> None:
    found = Counter(tuple(permuted(size, mix(1, key))) for key in range(KEYS))
    every = [found[one] for one in itertools.permutations(range(size))]
    assert sum(every) == KEYS
    assert surprise(every, KEYS / len(every)) < 4


@pytest.mark.matrix(2)
@pytest.mark.parametrize("size", [7, 9, 16, 23, 64])
def test_every_sample_comes_at_every_position_and_beside_every_other(size: int) -> None:
    drawn = np.array([permuted(size, mix(2, key)) for key in range(KEYS)])
    places = [np.bincount(column, minlength=size) for column in drawn.T]
    assert surprise(places, len(drawn) / size) < 4
    for first, second in ((0, 1), (0, size - 1), (size // 2 - 1, size // 2)):
        pairs = np.bincount(drawn[:, first] * size + drawn[:, second], minlength=size * size)
        apart = pairs.reshape(size, size)[~np.eye(size, dtype=bool)]
        assert surprise(apart, len(drawn) / apart.size) < 4
    steps = (drawn[:, 1:] - drawn[:, :-1]) % size
    assert surprise(np.bincount(steps.ravel())[1:], steps.size / (size - 1)) < 4


def test_a_long_order_is_spread_as_evenly_as_torch_spreads_one() -> None:
    size, parts = LISTED + 1, 64
    ids = np.array(permuted(size, 5))
    for one in (ids, torch.randperm(size, generator=torch.Generator().manual_seed(5)).numpy()):
        cell = one * parts // size
        place = np.arange(size) * parts // size
        table = np.bincount(place * parts + cell, minlength=parts * parts)
        assert abs(surprise(table, size / parts**2)) < 4
        following = np.bincount(cell[:-1] * parts + cell[1:], minlength=parts * parts)
        assert abs(surprise(following, size / parts**2)) < 4


# -- draws by weight ------------------------------------------------------------------------------


def test_draws_follow_the_weights_and_come_again_at_any_position() -> None:
    weights = np.array([0.0, 1.0, 3.0, 0.0, 0.5, 0.0])
    at = draws(np.cumsum(weights), 9)
    drawn = at(np.arange(90_000, dtype=np.uint64))
    found = np.bincount(drawn, minlength=6)
    assert found[weights == 0].sum() == 0
    expected = weights[weights > 0] / weights.sum() * len(drawn)
    assert ((found[weights > 0] - expected) ** 2 / expected).sum() < 16
    assert at(np.arange(70_000, 70_050, dtype=np.uint64)).tolist() == drawn[70_000:70_050].tolist()
    pairs = np.bincount((drawn[:-1] == 2) * 2 + (drawn[1:] == 2))
    likely = expected[1] / len(drawn)
    alone = np.array([(1 - likely) ** 2, likely * (1 - likely), likely * (1 - likely), likely**2])
    assert ((pairs - alone * pairs.sum()) ** 2 / (alone * pairs.sum())).sum() < 20


def test_more_samples_than_torch_draws_from_are_drawn_by_weight() -> None:
    size = (1 << 24) + 8

    class Source(DataSource):
        train = Numbers(size)

        def sample_weights(self) -> Tensor:
            return torch.arange(size, dtype=torch.float32) >= size - 8

    task = Proportion()
    task.data = Source()
    loading = Loading(weighted=True)
    feed = TrainLoader(task, loading, BatchPartition(512, 512, 1, 0), LocalCommunicator(), seed=0)
    steps = feed.steps()
    drawn = Counter(next(steps).micro_batches[0].batch[1].tolist())
    assert sorted(drawn) == list(range(size - 8, size))
    assert surprise(list(drawn.values()), 512 / 8) < 4
    steps.close()


def test_weights_that_no_number_holds_the_sum_of_are_refused() -> None:
    class Source(DataSource):
        train = Numbers(8)

        def sample_weights(self) -> Tensor:
            return torch.full((8,), 1e308, dtype=torch.float64)

    task = Proportion()
    task.data = Source()
    with pytest.raises(ConfigError, match="add up to more"):
        TrainLoader(
            task, Loading(weighted=True), BatchPartition(4, 4, 1, 0), LocalCommunicator(), seed=0
        )


# -- where an order is computed -------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_anywhere_in_a_trillion_samples_takes_no_memory(shuffle: bool) -> None:
    size = 10**12
    sampler = GlobalSampler(size, BatchPartition(32, 32, 1, 0), seed=0, shuffle=shuffle)
    tracemalloc.start()
    for consumed in (0, 9 * 10**11, size - 64):
        plans = list(itertools.islice(sampler.plans(consumed), 4))
        assert [len(plan.shares[0].ids) for plan in plans] == [32] * 4
        assert all(0 <= i < size for plan in plans for i in plan.shares[0].ids)
    assert [plan.epoch for plan in plans] == [0, 0, 1, 1]
    assert tracemalloc.get_traced_memory()[1] < 100 * 8 * BLOCK
    tracemalloc.stop()


def test_an_evaluation_lists_no_samples() -> None:
    task = Proportion()
    task.data.eval = Numbers(10**10)
    loading, cut = Loading(eval_batch_size=4), BatchPartition(4, 4, 1, 0)
    batches = eval_batches(task, "eval", loading, cut, LocalCommunicator(), limit=2)
    assert [batch[1].tolist() for batch, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_computed_order_goes_on_from_any_position(weighted: bool) -> None:
    size = 3 * BLOCK + 5
    weights = torch.rand(size, generator=torch.Generator().manual_seed(0)) if weighted else None
    cut = BatchPartition(1000, 1000, 1, 0)
    sampler = GlobalSampler(size, cut, seed=3, weights=weights, listed=False)
    whole = list(itertools.islice(sampler.plans(0), 103))
    ids = [i for plan in whole[: sampler.steps_per_epoch] for i in plan.shares[0].ids]
    assert weighted or sorted(ids) == list(range(size))
    for stop in (1, 16, 17, 49, 50, 51, 99):
        consumed = sum(plan.samples for plan in whole[:stop])
        assert list(itertools.islice(sampler.plans(consumed), 4)) == whole[stop : stop + 4]


@pytest.mark.parametrize("size", [LISTED, LISTED + 1])
def test_up_to_a_million_samples_the_order_is_the_one_that_torch_lists(size: int) -> None:
    plan = next(GlobalSampler(size, BatchPartition(8, 8, 1, 0), seed=0).plans(16))
    listed = epoch_order(size, seed=0, epoch=0, shuffle=True)[16:24]
    assert (plan.shares[0].ids == listed) == (size == LISTED)


# -- going on -------------------------------------------------------------------------------------


def train(folder: Path, *, steps: int, size: int = SIZE, **knobs: Any) -> list[list[int]]:
    task = Proportion(size)
    checkpoint = CheckpointOptions(every_steps=3, **knobs)
    Trainer(
        task=task,
        strategy="single",
        loading=Loading(batch_size=4),
        checkpoint=checkpoint,
        run_dir=folder,
        max_steps=steps,
    ).fit()
    return task.seen


def test_a_checkpoint_from_before_goes_on_in_the_order_that_it_has(tmp_path: Path) -> None:
    before = shutil.copytree(LISTED_ORDER / "step-00000003", tmp_path / "step-00000003")
    listed = epoch_order(SIZE, seed=0, epoch=0, shuffle=True)
    seen = train(tmp_path / "run", steps=6, resume=str(before))
    assert seen == [listed[at : at + 4] for at in (12, 16, 20)]
    # What it saves is of that order too.
    seen = train(tmp_path / "run", steps=8)
    assert seen == [listed[at : at + 4] for at in (24, 28)]


def test_a_run_goes_on_in_the_order_that_it_computes(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", steps=6)
    train(tmp_path / "cut", steps=3)
    saved = tmp_path / "cut" / "checkpoints" / "step-00000003" / "state.json"
    assert json.loads(saved.read_text())["feed"] == {"order": "computed"}
    assert train(tmp_path / "cut", steps=6) == whole[3:]
    assert whole[0] != epoch_order(SIZE, seed=0, epoch=0, shuffle=True)[:4]


def test_other_data_that_is_allowed_comes_in_its_own_order(tmp_path: Path) -> None:
    train(tmp_path, steps=3)
    seen = train(tmp_path, steps=5, size=64, allow=["data"])
    listed = epoch_order(64, seed=0, epoch=0, shuffle=True)
    assert seen == [listed[12:16], listed[16:20]]
