"""Before the first step: have all processes the same data?"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.draws import drawing_from, seed_draws
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sampler import mix
from torsh_trainer.data.sketch import Sketch, sketch
from torsh_trainer.data.splits import dataset_of
from torsh_trainer.data.weighting import sample_weights_of
from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import Task

log = logging.getLogger(__name__)

SAMPLES = 16
ENOUGH, LONGEST_S = 2, 1.0
"""Of a split ``SAMPLES`` are read; where that takes longer, fewer, and at least ``ENOUGH``."""

_FIX = (
    "make the same data on every process: seed what draws, as in random_split(..., "
    "generator=torch.Generator().manual_seed(0)), and sort what a folder lists"
)


class Excerpt(NamedTuple):
    """What one process has of a split.

    ``size`` is the number of samples, "a stream" or "no dataset"; ``sketches`` are those of the
    samples at ``spread(size)``, as far as time allowed; None for one that cannot be read.
    """

    size: int | str
    sketches: tuple[Sketch | None, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(hashlib.blake2b(repr(one).encode()).hexdigest()[:16] for one in self.sketches)


def check_same_data(
    task: Task, splits: Sequence[str], loading: Loading, comm: Communicator, *, seed: int
) -> dict[str, Excerpt]:
    """Makes the datasets of ``splits``, and returns when every process has the same ones.

    Some samples of each are compared, drawn as in the first epoch, and given. Streams are not read,
    and one process reads nothing. Collective.

    Raises:
        ConfigError: on every process; it names what differs, and between whom.
    """
    datasets = {split: dataset_of(task, split, seed=seed) for split in splits}
    if comm.size == 1:
        return {}
    readers = {s: Reader(dataset, loading, seed) for s, dataset in datasets.items()}
    mine = {split: reader.excerpt() for split, reader in readers.items()}
    facts = {split: (excerpt.size, excerpt.digests) for split, excerpt in mine.items()}
    weights = _weights_digest(task, mine, loading, seed)
    everyone = comm.all_gather_object((facts, weights))
    for split, excerpt in mine.items():
        sizes, digests = zip(*(theirs[split] for theirs, _ in everyone), strict=True)
        _check_sizes(split, sizes)
        fewest = min(map(len, digests))
        if len({some[:fewest] for some in digests}) > 1:
            _compare(split, excerpt, readers[split], comm, fewest=fewest)
    _check_weights([theirs for _, theirs in everyone])
    return mine


def spread(size: int) -> list[int]:
    """Numbers of some samples out of ``size``, the first of them as far apart as all: the last one,
    then van der Corput's sequence (1935) in base 2."""
    numbers = [size - 1, *(int(_mirror_digits(i) * size) for i in range(SAMPLES - 1))]
    return list(dict.fromkeys(numbers)) if size else []


def _mirror_digits(number: int) -> float:
    """The binary digits of ``number`` behind the point, in the other order."""
    result, place = 0.0, 0.5
    while number:
        result, place, number = result + place * (number & 1), place / 2, number >> 1
    return result


def _can_fork() -> bool:
    # A process that was started as a daemon has no children.
    forks = "fork" in multiprocessing.get_all_start_methods()
    return forks and not multiprocessing.current_process().daemon


class Reader:
    """Reads samples of a dataset as training will: in this process, or in a loader process.

    Where there are loader processes, nothing may be opened here that they would inherit. ``apart``
    reads in a process of its own in any case, where the system can fork one: a dataset that keeps
    count or draws by itself is not disturbed.
    """

    def __init__(self, dataset: Any, loading: Loading, seed: int, *, apart: bool = False) -> None:
        self._dataset = dataset
        self._forks = apart and not loading.workers and _can_fork()
        self._workers = loading.workers or int(self._forks)
        self._seed = seed

    def excerpt(self) -> Excerpt:
        if self._dataset is None:
            return Excerpt("no dataset")
        if isinstance(self._dataset, IterableDataset):
            return Excerpt("a stream")
        size = len(self._dataset)
        return Excerpt(size, tuple(self.read(spread(size))))

    def read(self, numbers: list[int]) -> list[Sketch | None]:
        read: list[Sketch | None] = []
        with drawing_from(self._seed):
            began = time.perf_counter()
            for one in self._sketches(numbers):
                read.append(one)
                if len(read) >= ENOUGH and time.perf_counter() - began > LONGEST_S:
                    break
        return read

    def _sketches(self, numbers: list[int]) -> Iterable[Sketch | None]:
        sketches = _Sketches(self._dataset, self._seed)
        if not self._workers:
            return (sketches[number] for number in numbers)
        return DataLoader(
            sketches,
            batch_size=None,
            sampler=numbers,
            num_workers=1,
            prefetch_factor=1,
            multiprocessing_context="fork" if self._forks else None,
            collate_fn=_as_it_is,
        )


class _Sketches(Dataset["Sketch | None"]):
    """Sketches of a dataset's samples, with what they draw in the first epoch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, number: int) -> Sketch | None:
        seed_draws(mix(self._seed, 0, number))
        try:
            if hasattr(self._dataset, "__getitems__"):
                return sketch(self._dataset.__getitems__([number])[0])
            return sketch(self._dataset[number])
        except Exception:  # noqa: BLE001 - training says it, when it comes there
            return None


def _as_it_is(one: Any) -> Any:
    return one


def _compare(split: str, mine: Excerpt, reader: Reader, comm: Communicator, *, fewest: int) -> None:
    """Refuses the first sample that differs, unless it does so from one reading to the next."""
    assert isinstance(mine.size, int)
    numbers = spread(mine.size)[:fewest]
    by_rank = comm.all_gather_object(mine.sketches[:fewest])
    differing = list(_differing(numbers, by_rank))
    for number, place, rank in differing:
        again = reader.read([number])[0]
        steady = all(comm.all_gather_object(again == mine.sketches[place]))
        if steady:
            raise ConfigError(
                f"sample {number} of data.{split} differs between rank 0 and rank {rank}",
                fix=_FIX,
                split=split,
                sample=number,
                rank=rank,
            )
    if differing and comm.world.is_rank_zero:
        log.warning(
            "data.%s draws from generators that the run does not seed: its samples come out "
            "otherwise each time, so nobody can tell whether all processes have the same",
            split,
        )


def _differing(
    numbers: Sequence[int], by_rank: Sequence[Sequence[Sketch | None]]
) -> Iterator[tuple[int, int, int]]:
    """(sample number, its place, the first rank that has another one than rank 0)."""
    for place, number in enumerate(numbers):
        first = by_rank[0][place]
        for rank, sketches in enumerate(by_rank):
            other = sketches[place]
            if first is not None and other is not None and not first.resembles(other):
                yield number, place, rank
                break


def _check_sizes(split: str, sizes: Sequence[int | str]) -> None:
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise ConfigError(
                f"data.{split} is {_words(sizes[0])} on rank 0 and {_words(size)} on rank {rank}",
                fix=_FIX,
                split=split,
                rank=rank,
            )


def _words(size: int | str) -> str:
    return size if isinstance(size, str) else f"{size} samples"


def _weights_digest(task: Task, mine: dict[str, Excerpt], loading: Loading, seed: int) -> str:
    """The same where the weights are; a refusal of them waits until all ranks are there."""
    size = mine["train"].size if "train" in mine else None
    if not loading.weighted or not isinstance(size, int):
        return ""
    try:
        weights = sample_weights_of(task, size, seed=seed)
    except ConfigError as error:
        return str(error)
    return hashlib.blake2b(weights.contiguous().numpy().data).hexdigest()


def _check_weights(digests: Sequence[str]) -> None:
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ConfigError(
                f"sample_weights() of the data source differs between rank 0 and rank {rank}",
                fix="compute it from the training samples alone, alike on every process",
                rank=rank,
            )
