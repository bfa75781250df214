"""``task.order=ours`` and loaders: what they keep, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback
from lightning.pytorch.utilities import CombinedLoader
from modules.ordered import (
    BATCH,
    FEATURES,
    HELD_OUT,
    TRAIN,
    Data,
    Net,
    Rows,
    loss_of,
    on_rank,
    ours,
    run,
)
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from torsh_trainer.data import sampler
from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import Task


def stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) + 0.5


def noted(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.rows += 1.0


class Looks(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.loader = trainer.train_dataloader


def test_a_loader_keeps_all_but_its_order(tmp_path):
    looks = Looks()
    kept = {"collate_fn": stacked, "drop_last": True, "persistent_workers": True, "num_workers": 2}
    data = Data(noise=0.1, worker_init_fn=noted, **kept)
    worked = run(tmp_path / "workers", ours(data=lambda: data, callbacks=[looks]))
    assert worked["samples"] == [8, 16, 24, 32, 40, 48]
    for name, value in kept.items():
        assert getattr(looks.loader, name) == value
    assert looks.loader.batch_size == BATCH
    assert len(looks.loader) == 3
    assert looks.loader.dataset.noise == data.rows.noise  # whatever else the dataset is asked
    here = Data(noise=0.1, collate_fn=stacked, drop_last=True)
    here.rows.rows += 1.0
    assert run(tmp_path / "here", ours(data=lambda: here))["loss"] == worked["loss"]


MANY = sampler.LISTED + TRAIN


class Million(Rows):
    """More rows than an order is a list of."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index % len(self.rows)]


class Many(Data):
    def __init__(self) -> None:
        super().__init__()
        self.rows = Million(TRAIN)


@pytest.mark.parametrize("listed", [False, True], ids=["computed", "from before"])
def test_a_run_over_many_samples_goes_on_in_the_order_that_it_has(listed, tmp_path, monkeypatch):
    def train(name: str, steps: int, **knobs: Any) -> list[float]:
        limits = {"max_epochs": None, "max_steps": steps}
        return run(tmp_path / name, ours(data=Many), every=3, **limits, **knobs)["loss"]

    computed = train("computed", 6)
    if listed:  # as a release that knew nothing else would have begun
        monkeypatch.setattr(sampler, "LISTED", MANY)
    whole = train("whole", 6)
    assert (whole == computed) != listed
    train("cut", 3)
    monkeypatch.undo()
    assert train("cut", 6, resume="auto")[-3:] == whole[-3:]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(Rows(TRAIN))


class OwnBatches(BatchSampler):
    pass


class Placed(DataLoader[Tensor]):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Several(Data):
    def train_dataloader(self) -> Any:
        return [super().train_dataloader(), super().train_dataloader()]


class Listed(Data):
    def train_dataloader(self) -> Any:
        return [torch.ones(2, FEATURES)]


class Aside(Data):
    def val_dataloader(self) -> Any:
        return CombinedLoader([super().val_dataloader(), super().val_dataloader()], "min_size")


class Streams(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=BATCH)


class KeepsPlace(Data):
    def train_dataloader(self) -> Any:
        return Placed(self.rows, batch_size=BATCH)


class HeldOutSampler(Data):
    def val_dataloader(self) -> Any:
        rows = Rows(HELD_OUT)
        return DataLoader(rows, sampler=DistributedSampler(rows, num_replicas=1, rank=0))


class Takes(Net):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return loss_of(self.net, next(dataloader_iter)[0])


def sampled(sampler: Any) -> Callable[[], Data]:
    return lambda: Data(shuffle=None, sampler=sampler)


WEIGHTS = torch.ones(TRAIN)
REFUSED: dict[str, tuple[Callable[[], Task], str]] = {
    "a stream": (lambda: ours(data=Streams), "IterableDataset Stream in train_dataloader"),
    "no loader": (lambda: ours(data=Listed), "a Tensor in train_dataloader"),
    "several": (lambda: ours(data=Several), "2 loaders in train_dataloader"),
    "side by side": (lambda: ours(data=Aside), "a CombinedLoader of mode min_size"),
    "a loader with a state": (lambda: ours(data=KeepsPlace), "Placed in train_dataloader, which"),
    "no batches": (lambda: ours(data=lambda: Data(batch_size=None)), "with batch_size=None"),
    "a batch sampler": (
        lambda: ours(
            data=lambda: Data(
                batch_size=1,
                shuffle=None,
                batch_sampler=OwnBatches(SequentialSampler(Rows(TRAIN)), 4, False),
            )
        ),
        "the batch sampler OwnBatches in train_dataloader",
    ),
    "a sampler": (
        lambda: ours(data=sampled(DistributedSampler(Rows(TRAIN), num_replicas=1, rank=0))),
        "the sampler DistributedSampler in train_dataloader",
    ),
    "a sampler of validation": (
        lambda: ours(data=HeldOutSampler),
        "the sampler DistributedSampler in val_dataloader",
    ),
    "few draws": (
        lambda: ours(data=sampled(WeightedRandomSampler(WEIGHTS, 5))),
        "the sampler WeightedRandomSampler",
    ),
    "draws of few": (
        lambda: ours(data=sampled(WeightedRandomSampler(WEIGHTS[1:], TRAIN - 1))),
        "the sampler WeightedRandomSampler",
    ),
    "replacement": (
        lambda: ours(data=sampled(RandomSampler(Rows(TRAIN), replacement=True))),
        "RandomSampler with replacement",
    ),
    "a generator": (
        lambda: ours(data=lambda: Data(generator=torch.Generator())),
        "a generator for the order of train_dataloader",
    ),
    "no shares": (
        lambda: ours(use_distributed_sampler=False),
        "task.use_distributed_sampler=false",
    ),
    "a finder": (
        lambda: ours(callbacks=[BatchSizeFinder()]),
        "BatchSizeFinder in task.callbacks",
    ),
    "an iterator": (lambda: ours(Takes), "training_step(dataloader_iter)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_order_that_would_be_lost_is_refused_by_name(name, tmp_path):
    task, words = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        run(tmp_path, task())
    assert "task.order=ours cannot honour" in str(refused.value)
    assert words in str(refused.value)
    assert refused.value.fix


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_would(on_ranks, tmp_path):
    task = lambda: ours(data=lambda: Data(batch_size=7))  # noqa: E731
    for told in on_ranks(on_rank, tmp_path / "odd", task, {"strategy": "ddp"}):
        assert "batch_size=7 of train_dataloader is that of all processes" in told
        assert "batch_size=6 or 8 would" in told


def test_an_order_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match=r"task.order=our is unknown; did you mean 'ours'"):
        ours(order="our")
