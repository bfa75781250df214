"""Which samples a run consumes, when it is interrupted and goes on: on real ranks, to the loss."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.feed import TrainLoader
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sampler import BatchPartition
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import (
    SAMPLES,
    Leg,
    Sentences,
    SentenceTask,
    differences,
    live,
    saving,
)
from torsh_trainer.testing.tiny import TinyModelOptions
from torsh_trainer.training.trainer import Trainer

STEPS = 8
"""Two epochs of 8, 8 and a tail of 6 samples, and two steps more."""

Journey = Sequence[tuple[int, int]]
"""On so many ranks up to such a step, and on."""


class Reading(IterableDataset[dict[str, Tensor]]):
    """The sentences as a stream, in another order each pass, each process its part of them."""

    def __init__(self) -> None:
        self.sentences = Sentences(augmented=True)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self._epoch)
        ids = torch.randperm(SAMPLES, generator=generator).tolist()
        info = get_worker_info()
        return ids if info is None else ids[info.id :: info.num_workers]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in self.order():
            yield self.sentences[index]


class Keeping(Reading):
    """The same, which keeps where it is."""

    def __init__(self) -> None:
        super().__init__()
        self._begin = self._at = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        mine = self.order()
        begin, self._begin = self._begin, 0
        for self._at in range(begin + 1, len(mine) + 1):
            yield self.sentences[mine[self._at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "epoch": torch.tensor(self._epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["epoch"]) == self._epoch, "put back before it was told the epoch"
        self._begin = self._at = state["at"]


class Broken(Keeping):
    """Forgets where it was."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes nothing back."""


KINDS = {"stream": Reading, "keeping": Keeping, "broken": Broken}


class ReadingTask(SentenceTask):
    """The tiny task over one of the datasets above, or over the sentences as they are."""

    def __init__(self, kind: str) -> None:
        super().__init__(TinyModelOptions(dropout=0.2))
        if kind != "map":
            self.data.train = KINDS[kind]()


def one_leg(
    comm: Communicator, kind: str, loading: Loading, folder: Path, until: int, known: bool
) -> Leg:
    """A life of the run, with data that has seen none of it before."""
    # A rank of a pool is a daemon, which may have no children, and would start them by a server.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)
    task = ReadingTask(kind)
    if known:
        task.sample_weight = 1.0
    trainer = Trainer(
        task=task,
        strategy=DDP(bucket_cap_mb=0.0005) if comm.world.size > 1 else Single(),
        loading=loading,
        checkpoint=saving(folder, keep_last=1),
        log_every=1,
        eval_every=2,
        eval_every_epochs=None,
        max_steps=STEPS,
        deterministic=True,
        device="cpu",
        log_level="error",
    )
    return live(comm, trainer, folder, until=until)


def travelled(
    kind: str, loading: Loading, folder: Path, journey: Journey, *, known: bool = False
) -> dict[int, list[tuple[list[int], float]]]:
    """By step, the micro-batches in the order of the global batch: ids that counted, and loss."""
    steps: dict[int, list[tuple[list[int], float]]] = {}
    for ranks, until in journey:
        legs = shared_pool(ranks).run(one_leg, kind, loading, folder, until, known)
        for step in legs[0].consumed:
            mine = [list(zip(leg.consumed[step], leg.losses[step], strict=True)) for leg in legs]
            rounds = range(max(map(len, mine)))
            steps[step] = [part[i] for i in rounds for part in mine if i < len(part)]
    assert sorted(steps) == list(range(1, STEPS + 1))
    return steps


def loading(workers: int, **knobs: Any) -> Loading:
    return Loading(batch_size=8, micro_batch_size=2, num_workers=workers, **knobs)


CASES = [
    *[(1, kind, workers) for kind in ("stream", "keeping") for workers in (0, 1, 3)],
    *[(2, kind, workers) for kind in ("map", "stream", "keeping") for workers in (0, 2)],
    (4, "map", 1),
    (4, "keeping", 0),
    (4, "keeping", 1),
]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("ranks", "kind", "workers"), CASES)
def test_an_interrupted_run_consumes_what_the_uninterrupted_one_does(
    ranks: int, kind: str, workers: int, tmp_path: Path
) -> None:
    """In the middle of an epoch, at its end and right after; the losses are equal bit for bit."""
    whole = travelled(kind, loading(workers), tmp_path / "whole", [(ranks, STEPS)])
    journey = [(ranks, until) for until in (1, 3, 4, STEPS)]
    parts = travelled(kind, loading(workers), tmp_path / "parts", journey)
    assert differences(parts, whole) == []
    if workers <= 1:  # several processes end a pass each with a tail of its own
        first = [index for step in (1, 2, 3) for ids, _ in whole[step] for index in ids]
        assert sorted(first) == list(range(SAMPLES))


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("kind", "workers", "knobs"),
    [
        ("map", 0, {"drop_last": True}),
        ("map", 2, {}),
        ("stream", 0, {}),
        ("keeping", 0, {}),
        ("keeping", 2, {}),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["known weights", "asked weights"])
def test_it_consumes_the_same_on_another_number_of_ranks(
    kind: str, workers: int, knobs: dict[str, Any], known: bool, tmp_path: Path
) -> None:
    reading = loading(workers, **knobs)
    whole = travelled(kind, reading, tmp_path / "whole", [(1, STEPS)], known=known)
    journey = [(1, 2), (2, 3), (4, 5), (2, 6), (1, STEPS)]
    parts = travelled(kind, reading, tmp_path / "parts", journey, known=known)
    for step, expected in whole.items():
        assert [ids for ids, _ in parts[step]] == [ids for ids, _ in expected], step
        # The same units were dropped, the same factors drawn; sums were taken in another order.
        losses = [loss for _, loss in expected]
        assert [loss for _, loss in parts[step]] == pytest.approx(losses, rel=1e-4), step


def test_a_stream_that_forgets_where_it_was_shows(tmp_path: Path) -> None:
    """The negative control of all of the above."""
    whole = travelled("broken", loading(0), tmp_path / "whole", [(2, STEPS)])
    parts = travelled("broken", loading(0), tmp_path / "parts", [(2, 1), (2, STEPS)])
    assert parts[1] == whole[1]
    assert parts[2] != whole[2]


def test_ranks_that_read_different_streams_are_told_of(tmp_path: Path) -> None:
    said = shared_pool(2).run(unlike, tmp_path)
    assert "do not read the same stream" in said[0]
    assert said[1] == ""
    assert shared_pool(2).run(alike, tmp_path) == ["", ""]


def unlike(comm: Communicator, folder: Path) -> str:
    return words(comm, at=comm.world.rank)


def alike(comm: Communicator, folder: Path) -> str:
    return words(comm, at=0)


def words(comm: Communicator, *, at: int) -> str:
    """What the feed has to say on this rank, after a step, about a state that says ``at``."""

    class Odd(Keeping):
        def state_dict(self) -> dict[str, Any]:
            return {"at": at, "epoch": torch.tensor(0)}

    task = ReadingTask("keeping")
    task.data.train = Odd()
    cut = BatchPartition(8, 2, comm.world.size, comm.world.rank)
    feed = TrainLoader(task, loading(0), cut, comm, seed=0)
    steps = feed.steps()
    next(steps)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torsh_trainer.data.feed")
    logger.addHandler(handler)
    try:
        feed.state_dict()
    finally:
        logger.removeHandler(handler)
        steps.close()
    return " ".join(said)
