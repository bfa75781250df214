"""What a feed hands out after a resume is what it would have handed out without one."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from torsh_trainer import DataSource, Loading, Task
from torsh_trainer.checkpoint import plain
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.data.batch import MicroBatch
from torsh_trainer.data.feed import TrainLoader, eval_batches
from torsh_trainer.data.sampler import BatchPartition
from torsh_trainer.data.stream import digest, has_length, reading_processes
from torsh_trainer.errors import ConfigError, ResourceError

SIZE = 23
"""Samples: five global batches of four, and a tail of three."""
STEPS = 15
"""Two epochs and a bit."""


def drawn() -> list[float]:
    """What an augmentation draws, from everywhere."""
    return [torch.rand(()).item(), random.random(), float(np.random.random())]  # noqa: NPY002


class Recording(Dataset[Any]):
    """Samples that say who they are and what was drawn for them; ``log`` gets who was fetched."""

    def __init__(self, log: Path | None = None) -> None:
        self._log = log

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{index}\n")
        return index, drawn()


def collate(samples: list[Any]) -> list[Any]:
    """As they are, so that the test sees what the loss would see."""
    return samples


class Source(DataSource):
    collate = staticmethod(collate)

    def __init__(self, train: Any, evaluated: Any = None) -> None:
        self.train = train
        self.eval = evaluated

    def sample_weights(self) -> Tensor:
        return torch.arange(1.0, SIZE + 1)


class Reading(Task):
    """Only data; the weight of a batch is asked for when ``asked``."""

    def __init__(self, train: Any, *, asked: bool = False, evaluated: Any = None) -> None:
        self.data = Source(train, evaluated)
        self.sample_weight = None if asked else 1.0

    def weight(self, batch: Any) -> float:
        return float(sum(index + 1 for index, _ in batch))


class Handed(NamedTuple):
    """A step, and what a checkpoint after it would hold of the data."""

    epoch: int
    ends_epoch: bool
    micro_batches: list[MicroBatch]
    samples: int
    state: Any

    @property
    def seen(self) -> tuple[Any, ...]:
        return self[:-1]

    @property
    def batches(self) -> list[list[Any]]:
        return [micro.batch for micro in self.micro_batches]

    @property
    def ids(self) -> list[int]:
        return [index for batch in self.batches for index, _ in batch]


def taken(
    task: Task,
    loading: Loading,
    count: int,
    *,
    behind: list[Handed] | None = None,
    cut: BatchPartition | None = None,
    overfit_batches: int | None = None,
) -> list[Handed]:
    """The steps that follow after those ``behind``, by a new feed from what a checkpoint holds."""
    behind = behind or []
    size = loading.batch_size or 4
    feed = TrainLoader(
        task,
        loading,
        cut or BatchPartition(size, size, 1, 0),
        LocalCommunicator(),
        seed=7,
        consumed=sum(step.samples for step in behind),
        step=len(behind),
        overfit_batches=overfit_batches,
        state=behind[-1].state if behind else None,
    )
    handed = []
    steps = feed.steps()
    for step in steps:
        state = stored(feed.state_dict())
        handed.append(Handed(step.epoch, step.ends_epoch, step.micro_batches, step.samples, state))
        torch.manual_seed(random.SystemRandom().getrandbits(31))  # a forward draws too
        if len(handed) == count:
            break
    steps.close()
    return handed


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint gives it back; raises for what it could not hold."""
    tensors, rest = plain.split(state)
    kept: dict[str, Any] = plain.decode(plain.encode(rest))
    for path, tensor in tensors.items():
        plain.put(kept, path, tensor.clone())
    return kept


def resumes_exactly(
    make: Callable[[], Task], loading: Loading, stops: Any = range(STEPS), **knobs: Any
) -> list[Handed]:
    """The uninterrupted steps, once every resumed run has been held against them."""
    whole = taken(make(), loading, STEPS, **knobs)
    for stop in stops:
        rest = taken(make(), loading, STEPS - stop, behind=whole[:stop], **knobs)
        assert [step.seen for step in rest] == [step.seen for step in whole[stop:]], stop
    return whole


# -- map-style datasets ---------------------------------------------------------------------------

MAP_KNOBS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "weighted": {"weighted": True},
    "whole batches": {"drop_last": True},
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("knobs", MAP_KNOBS)
@pytest.mark.parametrize("asked", [False, True], ids=["known weights", "asked weights"])
def test_a_map_dataset_goes_on_with_the_same_samples_and_draws(knobs: str, asked: bool) -> None:
    loading = Loading(batch_size=4, **MAP_KNOBS[knobs])
    whole = resumes_exactly(partial(Reading, Recording(), asked=asked), loading)
    assert {step.ends_epoch for step in whole} == {True, False}
    assert all(step.state == {} for step in whole)
    # A negative control: another position gives other samples.
    assert whole[3].ids != whole[4].ids


@pytest.mark.matrix(5)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("knobs", MAP_KNOBS)
def test_loader_processes_deliver_the_same_after_a_resume(knobs: str, workers: int) -> None:
    loading = Loading(batch_size=4, num_workers=workers, **MAP_KNOBS[knobs])
    whole = resumes_exactly(partial(Reading, Recording()), loading, stops=(3, 6))
    here = taken(Reading(Recording()), Loading(batch_size=4, **MAP_KNOBS[knobs]), STEPS)
    assert [step.seen for step in whole] == [step.seen for step in here]


@pytest.mark.parametrize("workers", [0, 2])
def test_overfitting_goes_on_within_the_same_batches(workers: int) -> None:
    for weighted in (False, True):
        loading = Loading(batch_size=4, num_workers=workers, weighted=weighted)
        whole = resumes_exactly(
            partial(Reading, Recording()), loading, stops=(1, 2), overfit_batches=2
        )
        assert {index for step in whole for index in step.ids} <= set(range(8))


def test_what_was_fetched_ahead_and_not_consumed_is_delivered_again(tmp_path: Path) -> None:
    log = tmp_path / "fetched"
    loading = Loading(batch_size=4, num_workers=2, prefetch_factor=2)
    before = taken(Reading(Recording(log)), loading, 3)
    consumed = [index for step in before for index in step.ids]
    fetched = [int(line) for line in log.read_text().split()]
    ahead = set(fetched) - set(consumed)
    assert ahead, "the test shows nothing unless something was fetched ahead"
    after = taken(Reading(Recording()), loading, 3, behind=before)
    assert sorted(consumed + [index for step in after for index in step.ids]) == list(range(SIZE))


def test_draws_that_nobody_seeds_would_not_come_again() -> None:
    loading = Loading(batch_size=4, seed_samples=False)
    whole = taken(Reading(Recording()), loading, 6)
    rest = taken(Reading(Recording()), loading, 3, behind=whole[:3])
    assert [step.ids for step in rest] == [step.ids for step in whole[3:]]
    assert [step.batches for step in rest] != [step.batches for step in whole[3:]]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["map", "stream", "stateful"])
def test_other_ranks_go_on_with_the_same_samples(before: int, after: int, kind: str) -> None:
    def on(ranks: int, count: int, behind: list[Handed] | None = None) -> list[list[Handed]]:
        return [
            taken(
                Reading(KINDS[kind]()),
                Loading(batch_size=4),
                count,
                behind=behind,
                cut=BatchPartition(4, 1, ranks, rank),
            )
            for rank in range(ranks)
        ]

    def consumed(parts: list[list[Handed]]) -> list[list[Any]]:
        """By step, the samples that counted, in the order of the global batch."""
        steps = []
        for mine in zip(*parts, strict=True):
            rounds = zip(*(step.micro_batches for step in mine), strict=True)
            steps.append(
                [
                    one
                    for micros in rounds
                    for micro in micros
                    if micro.weight
                    for one in micro.batch
                ]
            )
        return steps

    first = on(before, 4)
    whole = consumed(on(1, STEPS))
    assert consumed(first) == whole[:4]
    assert consumed(on(after, STEPS - 4, first[0])) == whole[4:]


def test_pinning_without_an_accelerator_is_refused() -> None:
    if torch.accelerator.is_available():
        pinned = taken(Reading(Recording()), Loading(batch_size=4, pin_memory=True), 2)
        assert len(pinned) == 2
        return
    for workers in (0, 1):
        loading = Loading(batch_size=4, pin_memory=True, num_workers=workers)
        for data in (Recording(), Plain()):
            with pytest.raises(ConfigError, match="no accelerator"):
                taken(Reading(data), loading, 1)


# -- streams --------------------------------------------------------------------------------------


def part(ids: list[int]) -> list[int]:
    """What this loader process is to deliver."""
    info = get_worker_info()
    return ids if info is None else ids[info.id :: info.num_workers]


class Plain(IterableDataset[Any]):
    """Knows its epoch and nothing else."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in part([(index + self.epoch) % SIZE for index in range(SIZE)]):
            yield index, drawn()


class Drawing(IterableDataset[Any]):
    """Shuffles by the generator of everybody, and by one of its own that lives on."""

    def __init__(self) -> None:
        self._random = random.Random(5)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SIZE).tolist()
        self._random.shuffle(order)
        return ((index, drawn()) for index in part(order))


class PutBack(Plain):
    """Keeps where it is; a pass begins where it was put back to, else at the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        mine = part([(index + self.epoch) % SIZE for index in range(SIZE)])
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, len(mine) + 1):
            self.read += 1
            yield mine[self.at - 1], drawn()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = self.at = state["at"]


class WindsBack(Plain):
    """Keeps where it is, and goes back to the beginning itself when a pass is through."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"at": 0, "seen": []}

    def __iter__(self) -> Iterator[Any]:
        mine = part([(index + self.epoch) % SIZE for index in range(SIZE)])
        while self.state["at"] < len(mine):
            self.state["at"] += 1
            self.state["seen"].append(mine[self.state["at"] - 1])  # changes what it handed out
            yield mine[self.state["at"] - 1], [*drawn(), float(sum(self.state["seen"]))]
        self.state["at"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Shuffling(IterableDataset[Any]):
    """Draws each pass from a generator that lives on, and keeps it, as a tensor, and its order."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)
        self._order: list[int] | None = None  # no pass has begun

    def __iter__(self) -> Iterator[Any]:
        if self._order is None:
            self._order = part(torch.randperm(SIZE, generator=self._generator).tolist())
        while self._order:
            yield self._order.pop(0), drawn()
        self._order = None

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order = state["order"]
        self._generator.set_state(state["generator"])


KINDS: dict[str, Callable[[], Any]] = {"map": Recording, "stream": Plain, "stateful": PutBack}
STATEFUL = [PutBack, WindsBack, Shuffling]


@pytest.mark.parametrize("kind", [Plain, Drawing, *STATEFUL])
@pytest.mark.parametrize("drop_last", [False, True], ids=["tail", "whole batches"])
def test_a_stream_goes_on_with_the_same_samples_and_draws(kind: Any, drop_last: bool) -> None:
    for asked in (False, True):
        loading = Loading(batch_size=4, drop_last=drop_last)
        whole = resumes_exactly(lambda: Reading(kind(), asked=asked), loading)  # noqa: B023
        first = [index for step in whole if step.epoch == 0 for index in step.ids]
        assert len(first) == len(set(first)) == (20 if drop_last else SIZE)


@pytest.mark.parametrize("kind", [Plain, Drawing, *STATEFUL])
def test_one_loader_process_keeps_the_order_of_a_stream(kind: Any) -> None:
    whole = resumes_exactly(
        lambda: Reading(kind()), Loading(batch_size=4, num_workers=1), stops=(1, 5, 6, 8)
    )
    here = taken(Reading(kind()), Loading(batch_size=4), STEPS)
    assert [step.seen for step in whole] == [step.seen for step in here]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", [Plain, *STATEFUL])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_stream_that_shares_itself_out_goes_on_on_as_many_processes(
    kind: Any, workers: int
) -> None:
    # Parts of unequal length: the processes end their passes at different chunks.
    loading = Loading(batch_size=4, num_workers=workers)
    whole = resumes_exactly(lambda: Reading(kind()), loading, stops=(1, 2, 4, 5, 6, 7, 8))
    first = [index for step in whole if step.epoch == 0 for index in step.ids]
    assert sorted(first) == list(range(SIZE))
    assert [step.epoch for step in whole] == sorted(step.epoch for step in whole)


@pytest.mark.parametrize("kind", [Plain, *STATEFUL])
def test_asked_weights_read_a_stream_one_step_ahead_and_save_what_was_consumed(kind: Any) -> None:
    loading = Loading(batch_size=4, num_workers=2)
    resumes_exactly(lambda: Reading(kind(), asked=True), loading, stops=(1, 6, 7))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("kind", [Plain, *STATEFUL])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_overfitting_a_stream_reads_its_first_batches_again_and_again(
    kind: Any, workers: int
) -> None:
    loading = Loading(batch_size=4, num_workers=workers)
    whole = resumes_exactly(
        lambda: Reading(kind()),
        loading,
        stops=range(1, 5) if workers == 0 else (1, 2, 3),
        overfit_batches=2,
    )
    assert [step.ends_epoch for step in whole[:4]] == [False, True, False, True]
    if not hasattr(kind, "set_epoch"):  # whose passes begin elsewhere each time
        assert whole[0].ids == whole[2].ids


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_of_its_own_spares_reading_the_stream_again(workers: int) -> None:
    class Counting(PutBack):
        def __iter__(self) -> Iterator[Any]:
            for index, _ in super().__iter__():
                yield index, [self.read]

    loading = Loading(batch_size=4, num_workers=workers)
    whole = taken(Reading(Counting()), loading, 4)
    assert whole[3].batches[0][-1][1] == [16]
    rest = taken(Reading(Counting()), loading, 1, behind=whole[:3])
    assert rest[0].batches[0][-1][1] == [4]
    # Without the state, the position is enough, by reading all of it again.
    bare = [step._replace(state={}) for step in whole[:3]]
    again = taken(Reading(Counting()), loading, 1, behind=bare)
    assert again[0].ids == whole[3].ids
    assert again[0].batches[0][-1][1] == [16]


def test_a_state_read_by_other_processes_gives_way_to_the_position(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, there = Loading(batch_size=4), Loading(batch_size=4, num_workers=1)
    whole = taken(Reading(PutBack()), here, 9)
    rest = taken(Reading(PutBack()), there, 2, behind=whole[:7])
    assert [step.seen for step in rest] == [step.seen for step in whole[7:]]
    assert "data.num_workers=0" in caplog.text


def test_a_stream_that_does_not_share_itself_out_is_refused_on_several_processes() -> None:
    class Whole(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return ((index, []) for index in range(SIZE))

    assert taken(Reading(Whole()), Loading(batch_size=4, num_workers=1), 6)[-1].ends_epoch
    with pytest.raises(ConfigError, match="every process would deliver every sample"):
        taken(Reading(Whole()), Loading(batch_size=4, num_workers=2), 1)


def test_a_dataset_sees_itself_in_the_information_about_its_process() -> None:
    class Asking(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None
            return iter([(info.id, [info.num_workers, info.dataset is self])] * 4)

    step = taken(Reading(Asking()), Loading(batch_size=4, num_workers=2), 1)[0]
    assert step.batches[0][0] == (0, [2, True])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_stream_arrives_as_the_sentence_that_it_is(workers: int) -> None:
    class Torn(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from [(0, []), (1, [])]
            raise ConfigError("the stream is torn", fix="mend it")

    with pytest.raises(ConfigError, match=r"^the stream is torn; mend it$"):
        taken(Reading(Torn()), Loading(batch_size=4, num_workers=workers), 1)


def test_a_stream_without_a_batch_is_refused() -> None:
    class Empty(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(ConfigError, match="gives no batch"):
        taken(Reading(Empty()), Loading(batch_size=4), 1)
    with pytest.raises(ConfigError, match="gives no batch"):
        taken(Reading(Plain()), Loading(batch_size=32, drop_last=True), 1)


def test_a_missing_torchdata_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(ResourceError, match=r"pip install 'torsh-trainer\[stream\]'"):
        taken(Reading(PutBack()), Loading(batch_size=4, num_workers=1), 1)
    # Nothing else needs it.
    assert taken(Reading(PutBack()), Loading(batch_size=4), 1)
    assert taken(Reading(Plain()), Loading(batch_size=4, num_workers=1), 1)


def test_only_an_order_that_depends_on_the_processes_counts_them() -> None:
    def count(dataset: Any) -> list[int | None]:
        return [reading_processes(dataset, Loading(num_workers=n)) for n in range(4)]

    assert count(Plain()) == [1, 1, 2, 3]
    assert count(Recording()) == [None] * 4


def test_the_length_of_a_shared_out_stream_says_nothing_of_its_steps() -> None:
    class Sized(Plain):
        def __len__(self) -> int:
            return SIZE

    for workers in (0, 1, 2):
        loading = Loading(batch_size=5, num_workers=workers)
        steps = taken(Reading(Sized()), loading, STEPS)
        in_pass = [step.epoch for step in steps].count(0)
        assert (in_pass == -(-SIZE // 5)) == has_length(Sized(), loading)


def test_a_digest_tells_states_apart() -> None:
    def state(**more: Any) -> dict[str, Any]:
        return {"at": 3, "rows": [1, 2.5, None], "mask": torch.tensor([True, False]), **more}

    assert digest(state()) == digest(dict(reversed(state().items())))
    others = [state(at=4), state(rows=[1, 2.5]), state(mask=torch.tensor([True, True]))]
    assert len({digest(one) for one in [state(), *others]}) == 4


# -- evaluation -----------------------------------------------------------------------------------


@pytest.mark.matrix(4)
@pytest.mark.parametrize("kind", [Recording, Plain, *STATEFUL])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_evaluation_sees_the_same_and_leaves_training_alone(kind: Any, workers: int) -> None:
    """Also one that was broken off, and one of part of the data."""
    loading = Loading(batch_size=4, num_workers=workers)
    undisturbed = taken(Reading(Recording()), loading, 8)
    task = Reading(Recording(), evaluated=kind())
    comm = LocalCommunicator()
    cut = BatchPartition(4, 4, 1, 0)

    def evaluated(limit: int | None = None, until: int | None = None) -> list[Any]:
        batches = eval_batches(task, "eval", loading, cut, comm, limit=limit)
        return [batch for _, (batch, _) in zip(range(until or SIZE), batches, strict=False)]

    feed = TrainLoader(task, loading, cut, comm, seed=7)
    steps = feed.steps()
    trained = [next(steps) for _ in range(3)]
    whole = evaluated()
    assert sorted(index for batch in whole for index, _ in batch) == list(range(SIZE))
    assert evaluated(until=2) == whole[:2]
    assert evaluated(limit=3) == whole[:3]
    assert evaluated() == whole
    trained += [next(steps) for _ in range(5)]
    steps.close()
    assert [s.micro_batches[0].batch for s in trained] == [s.batches[0] for s in undisturbed]
