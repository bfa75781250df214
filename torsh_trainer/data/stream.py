"""Steps out of an IterableDataset: pass after pass, the same stream on every rank.

A chunk is one global batch, cut out of the stream where it is read: in the loop, or in a loader
process, which then collates this rank's micro-batches of it. Where a dataset keeps its own state,
the state right after each chunk travels along, so that a resumed run goes on behind the chunk that
was consumed last, however much had been read ahead.
"""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from torsh_trainer.data.draws import Failed, seed_draws
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.moving import ToPin
from torsh_trainer.data.moving import pin as pinned
from torsh_trainer.data.sampler import BatchPartition, StepPlan, mix
from torsh_trainer.errors import ConfigError, ResourceError, TorshError

log = logging.getLogger(__name__)

_END: Any = object()


def keeps_state(dataset: Any) -> bool:
    """True for a dataset that says where it is and can be put back there."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def has_length(dataset: Any, loading: Loading) -> bool:
    """Whether ``len(dataset)`` says how many steps one pass takes.

    Loader processes that share a stream out end each with a ragged chunk of their own.
    """
    shared_out = isinstance(dataset, IterableDataset) and loading.workers > 1
    return hasattr(dataset, "__len__") and not shared_out


def reading_processes(dataset: Any, loading: Loading) -> int | None:
    """How many processes take turns to read, which the order of a stream depends on.

    One loader process reads as the loop does. None: a map-style dataset, whose order is ours.
    """
    return max(1, loading.workers) if isinstance(dataset, IterableDataset) else None


class Chunk(NamedTuple):
    """One global batch: how many samples it holds, and this rank's micro-batches of it.

    ``batches`` is None for what had been consumed before this run.
    """

    samples: int
    batches: list[Any] | None


class Stream:
    """Steps of a stream from a position on; an epoch is one pass, and one follows another.

    ``consumed`` samples lie behind, and ``state`` is what the property was then; a dataset with a
    state of its own is put back there (``loading.own_state``), any other one is read up to the
    position again.
    ``limit`` bounds the chunks of a pass, ``passes`` the passes. With ``ahead=1`` the reader of
    ``steps`` is one step ahead of what it hands out.

    Raises:
        ConfigError: an option that a stream cannot honour.
        ResourceError: torchdata is needed and not installed.
    """

    def __init__(
        self,
        dataset: Any,
        loading: Loading,
        cut: BatchPartition,
        collate: Callable[[list[Any]], Any],
        *,
        seed: int,
        pin: bool,
        consumed: int = 0,
        state: Mapping[str, Any] | None = None,
        ahead: int = 0,
        limit: int | None = None,
        passes: int | None = None,
    ) -> None:
        if loading.weighted:
            raise ConfigError(
                "data.weighted is not possible over an iterable dataset",
                fix="give the task a map-style dataset, or leave the option out",
            )
        self._cut = cut
        self._workers = workers = loading.workers
        self._stateful = loading.own_state and keeps_state(dataset)
        if keeps_state(dataset):
            rewind(dataset)
        kept = self._usable(state or {})
        self._consumed = 0 if kept else consumed
        self._epoch = int(kept["epoch"]) if kept else 0
        self._behind = int(kept["chunks"]) if kept else 0
        self._resumes = bool(kept)
        self._history = deque([kept], maxlen=1 + ahead)
        self._pin = pin
        self._limit = limit
        self._end = passes
        self._passes = Passes(
            dataset,
            cut,
            collate,
            seed=None if loading.seed_samples is False else seed,
            drop_last=loading.drop_last,
            # What several processes have read in turn can only be told apart where it arrives.
            skip=self._consumed if workers <= 1 else 0,
            limit=limit if workers <= 1 else None,
            rewinds=limit is not None,
        )
        self._source: Any = self._loader(loading, seed) if workers else self._passes
        if kept:
            self._source.load_state_dict(kept["loader"])

    def _usable(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state, where it is one of this dataset read in this way; else the position counts."""
        if not state or not self._stateful or state["num_workers"] == self._workers:
            return dict(state) if self._stateful else {}
        log.warning(
            "the state of the training data was saved with data.num_workers=%d, and this run has "
            "%d: the stream is read from its beginning, up to the position",
            state["num_workers"],
            self._workers,
        )
        return {}

    @property
    def state(self) -> dict[str, Any]:
        """Beside the position, what a resumed run needs; as of the step handed out last."""
        return self._history[0]

    def steps(self) -> Generator[tuple[StepPlan, list[Any]], None, None]:
        """Each step with this rank's micro-batches of it; loader processes end with it."""
        try:
            yield from self._steps()
        finally:
            reading = getattr(self._source, "_iterator", None)
            if reading is not None:  # left to the garbage collector, they may live on for long
                reading._shutdown_workers()

    def _steps(self) -> Iterator[tuple[StepPlan, list[Any]]]:
        epochs = itertools.count(self._epoch) if self._end is None else range(self._end)
        for epoch in epochs:
            empty = not self._resumes
            self._resumes = False
            for (chunk, state), last in _with_last(self._chunks(epoch)):
                empty = False
                if self._consumed:  # what was begun in another cut is passed over whole
                    self._consumed = max(0, self._consumed - chunk.samples)
                    continue
                self._history.append(state)
                shares = self._cut.shares(list(range(chunk.samples)))
                yield StepPlan(epoch, shares, chunk.samples, last), chunk.batches or []
            if empty:
                raise ConfigError(
                    "one pass over the iterable dataset gives no batch",
                    fix="check the data source; data.drop_last=true drops a short batch too",
                )

    def _chunks(self, epoch: int) -> Iterator[tuple[Chunk, dict[str, Any]]]:
        """The next pass, or what is left of it, each chunk with the state right after it."""
        number, self._behind = self._behind, 0
        left = None if self._limit is None else self._limit - number
        if self._workers:
            # The processes set it for themselves. Where they share it with this one, as Hugging
            # Face's datasets do, several at once would add up, unless it is there already.
            self._passes.set_epoch(epoch)
        for chunk in itertools.islice(self._source, left):
            if isinstance(chunk, Failed):
                raise chunk.error
            number += 1
            state: dict[str, Any] = {}
            if self._stateful:
                state = {
                    "num_workers": self._workers,
                    "epoch": epoch,
                    "chunks": number,
                    "loader": self._source.state_dict(),
                }
            if self._pin and not self._workers:
                chunk = pinned(chunk)
            yield chunk, state

    def _loader(self, loading: Loading, seed: int) -> Any:
        """Loader processes that live through all passes, as the dataset does without them."""
        make: Any = _stateful_loader if self._stateful else DataLoader
        return make(
            self._passes,
            batch_size=None,
            collate_fn=ToPin if self._pin else _as_it_is,
            num_workers=loading.workers,
            prefetch_factor=loading.prefetch_factor,
            persistent_workers=True,
            pin_memory=self._pin,
            # Seeds the processes; without it that would follow what a rank drew before.
            generator=torch.Generator().manual_seed(mix(seed)),
        )


class Passes(IterableDataset[Any]):
    """Passes over a dataset in one process: every iteration is the next pass, cut into chunks.

    Its state is the dataset's, with the pass and the chunks read of it. ``seed`` seeds what the
    dataset draws, by pass, process and chunk; None leaves that alone. ``skip`` samples had been
    consumed before. ``rewinds`` puts a dataset with a state back to its beginning for each pass.
    """

    def __init__(
        self,
        dataset: Any,
        cut: BatchPartition,
        collate: Callable[[list[Any]], Any],
        *,
        seed: int | None,
        drop_last: bool = False,
        skip: int = 0,
        limit: int | None = None,
        rewinds: bool = False,
    ) -> None:
        self._dataset = dataset
        self._cut = cut
        self._collate = collate
        self._seed = seed
        self._drop_last = drop_last
        self._skip = skip
        self._limit = limit
        self._beginning = _state_of(dataset) if rewinds and keeps_state(dataset) else None
        self._pass = -1
        self._number = 0
        self._ended = False
        self._begun_before = False  # a loaded state: it may hold what was asked for then
        self._goes_on = False  # in the pass of a loaded state
        self._loaded = False  # and the dataset has not been read since

    def __iter__(self) -> Iterator[Chunk | Failed]:
        # At once, not with the first chunk: a state asked for in between is the new pass's.
        if self._goes_on:
            self._goes_on = False
        else:
            self._pass, self._number, self._ended = self._pass + 1, 0, False
            self.set_epoch(self._pass)
            if self._beginning is not None:
                self._dataset.load_state_dict(copy.deepcopy(self._beginning))
        return self._chunks()

    def state_dict(self) -> dict[str, Any]:
        """Right after the chunk that was read last."""
        return {
            "pass": self._pass,
            "chunks": self._number,
            "ended": self._ended,
            "dataset": _state_of(self._dataset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on in the pass of ``state``, which may have nothing left."""
        self._pass, self._number = int(state["pass"]), int(state["chunks"])
        self._ended = bool(state["ended"])
        self.set_epoch(self._pass)
        if state["dataset"] is not None:
            self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        self._begun_before = self._goes_on = self._loaded = True

    def _chunks(self) -> Iterator[Chunk | Failed]:
        if self._ended:
            return
        size, process = self._cut.batch_size, _Process.here(self._dataset)
        try:
            self._seed_next(process)
            samples = self._samples()
            while not self._ended:
                wanted = min(size, self._skip) if self._skip else size
                block = list(itertools.islice(samples, wanted))
                self._ended = short = len(block) < wanted
                if not block or (short and self._drop_last):
                    self._ended = True
                    return
                if not self._begun_before:
                    process.check()
                self._number += 1
                self._ended = short or self._number == self._limit
                yield self._chunk(block)
                self._seed_next(process)
        except TorshError as error:
            yield Failed(error)

    def _samples(self) -> Iterator[Any]:
        """The dataset's samples from where it is.

        Some datasets, put back to the end of a pass, are done at once and start anew the next time;
        others start anew at once. Either way the next pass comes whole.
        """
        samples = iter(self._dataset)
        if self._loaded and not self._number:
            first = next(samples, _END)
            samples = iter(self._dataset) if first is _END else itertools.chain([first], samples)
        self._loaded = False
        return samples

    def _chunk(self, block: list[Any]) -> Chunk:
        if self._skip:
            self._skip -= len(block)
            return Chunk(len(block), None)
        shares = self._cut.shares(list(range(len(block))))
        return Chunk(len(block), [self._collate([block[i] for i in share.ids]) for share in shares])

    def _seed_next(self, process: _Process) -> None:
        if self._seed is not None:
            seed_draws(mix(self._seed, self._pass, process.number, self._number))

    def set_epoch(self, epoch: int) -> None:
        """Tells the dataset, where it wants to know."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class _Process:
    """The process that reads: the loop's, or one of the loader's.

    Several of the loader's deliver every sample as often as they are, unless the dataset asks for
    its part. So it is seen to that a dataset reads the number of its process.
    """

    def __init__(self, number: int, watched: _Watched | None) -> None:
        self.number = number
        self._watched = watched

    @classmethod
    def here(cls, dataset: Any) -> _Process:
        """This process; a dataset that asks sees itself, and not what surrounds it."""
        info: Any = get_worker_info()
        if info is None:
            return cls(0, None)
        if not isinstance(info, _Watched):
            info = _Watched(replace(info, dataset=dataset))
            torch_worker._worker_info = info
        return cls(info.info.id, info if info.info.num_workers > 1 else None)

    def check(self) -> None:
        if self._watched is not None and not self._watched.asked:
            raise ConfigError(
                f"data.num_workers={self._watched.info.num_workers}, but the iterable dataset does "
                "not share itself out: every process would deliver every sample",
                fix="data.num_workers=1, or let it keep the part that "
                "torch.utils.data.get_worker_info() names by id and num_workers",
            )


class _Watched:
    """A WorkerInfo that knows whether anybody asked for its number."""

    def __init__(self, info: Any) -> None:
        self.info = info
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        if name == "id":
            self.asked = True
        return getattr(self.info, name)


def digest(state: Any) -> int:
    """A checksum of a nested state, the same wherever the state is the same."""
    if isinstance(state, Mapping):
        state = [item for key in sorted(state, key=str) for item in (str(key), state[key])]
    if isinstance(state, list | tuple):
        return zlib.crc32(repr([digest(item) for item in state]).encode())
    if isinstance(state, Tensor):
        return zlib.crc32(bytes(state.detach().cpu().contiguous().view(-1).view(torch.uint8)))
    return zlib.crc32(repr(state).encode())


def rewind(dataset: Any) -> None:
    """Puts a dataset that keeps its state back to where it was when this was first called for it.

    One that restarts by itself needs none of this; one that was left in the middle does.
    """
    reference, beginning = _BEGINNINGS.get(id(dataset), (None, None))
    known = reference is not None and reference() is dataset  # numbers are given again
    if not known:
        _BEGINNINGS[id(dataset)] = weakref.ref(dataset), _state_of(dataset)
    elif beginning is not None:
        dataset.load_state_dict(copy.deepcopy(beginning))


_BEGINNINGS: dict[int, tuple[weakref.ref[Any], Any]] = {}
"""By identity: a dataset need not be hashable."""


def _state_of(dataset: Any) -> Any:
    """A copy, for the dataset may hand out what it goes on to change."""
    return copy.deepcopy(dataset.state_dict())


def _stateful_loader(dataset: Any, **knobs: Any) -> Any:
    try:  # an optional library, needed by nothing else in the core
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ResourceError(
            "data.num_workers over a dataset that keeps its own state needs torchdata, "
            "which is not installed",
            fix="pip install 'torsh-trainer[stream]', or data.num_workers=0",
        ) from error
    with warnings.catch_warnings():  # it calls what later releases of torch no longer want
        warnings.filterwarnings("ignore", message=".*set_vital")
        return StatefulDataLoader(dataset, **knobs)


def _as_it_is(chunk: Any) -> Any:
    return chunk


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item with whether it is the last."""
    items = iter(items)
    held = next(items, _END)
    while held is not _END:
        following = next(items, _END)
        yield held, following is _END
        held = following
