"""From datasets to steps: loading, weighting, moving to the device."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.dataset import TensorDataset

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.arithmetic import DEFAULT_BATCH_SIZE, fitting
from torsh_trainer.data.batch import MicroBatch, MicroBatchPlace, StepWork
from torsh_trainer.data.draws import Failed
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.moving import ToPin, mover_to
from torsh_trainer.data.moving import pin as pinned
from torsh_trainer.data.sampler import (
    BatchPartition,
    ForwardKeys,
    GlobalSampler,
    Share,
    StepPlan,
    is_computed,
    is_listed,
)
from torsh_trainer.data.seeding import Seeded
from torsh_trainer.data.splits import dataset_of
from torsh_trainer.data.stream import Stream, digest
from torsh_trainer.data.sums import common_sums
from torsh_trainer.data.weighting import drawable, sample_weights_of
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.tasks.base import Task, state_samples
from torsh_trainer.tasks.collating import LeftOut, stack

log = logging.getLogger(__name__)

Key = int | tuple[int, int]
Loaded = Generator[tuple[StepPlan, list[Any]], None, None]
"""Steps with this rank's batches; loader processes end with it."""


class TrainLoader:
    """Steps from a position on, without end.

    ``consumed`` samples and ``step`` steps lie behind, and ``state`` is what ``state_dict`` gave
    then. Weights of a step are known before its first backward: from the sampler when every sample
    weighs the same, else reduced over ranks while the step before it runs.

    Raises:
        ConfigError: there is no training data, or an option or a state does not fit it.
        ResourceError: a library that the data needs is not installed.
    """

    def __init__(
        self,
        task: Task,
        loading: Loading,
        cut: BatchPartition,
        comm: Communicator,
        *,
        seed: int,
        consumed: int = 0,
        step: int = 0,
        overfit_batches: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._task = task
        self._comm = comm
        self._cut = cut
        self._forward_keys = ForwardKeys(seed)
        self._step = step
        self._move = mover_to(comm.device)
        self._left_out = LeftOut(task)
        dataset = dataset_of(task, "train", seed=seed)
        if dataset is None:
            raise ConfigError("the task has no training data", fix="give task.data a train dataset")
        self.steps_per_epoch: int | None = None
        self._stream: Stream | None = None
        self._order: dict[str, Any] = {}
        if isinstance(dataset, IterableDataset):
            self._stream = Stream(
                dataset,
                loading,
                cut,
                collate_of(task),
                seed=seed,
                pin=_pins(loading, comm.device),
                consumed=consumed,
                state=state,
                ahead=1 if task.sample_weight is None else self._move.ahead,
                limit=overfit_batches,
            )
            self._loaded = self._stream.steps()
            return
        # Before overfit_batches takes the first samples: the weights are of all.
        weights = sample_weights_of(task, len(dataset), seed=seed) if loading.weighted else None
        if overfit_batches is not None:
            dataset = _First(dataset, overfit_batches * cut.batch_size)
        sampler = replace(
            _sampler(dataset, loading, cut, seed, weights), listed=is_listed(state, consumed)
        )
        own = sampler.weights
        if own is not None and is_computed(sampler.size, sampler.listed, weighted=True):
            sampler = replace(sampler, weights=None, sums=common_sums(own, comm))
        self._order = sampler.orders.state
        self.steps_per_epoch = sampler.steps_per_epoch
        self._loaded = _load_batches(
            sampler, dataset, collate_of(task), loading, comm.device, consumed
        )

    def __iter__(self) -> Iterator[StepWork]:
        return self.steps()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed feed needs beside the position, as of the step handed out last.

        Plain values and tensors, the same on every rank; {} where the position alone says all.
        Collective over the ranks.
        """
        if self._stream is None:
            return self._order
        state = self._stream.state
        if state and self._comm.size > 1:
            digests = self._comm.all_gather_object(digest(state))
            if len(set(digests)) > 1 and self._comm.world.is_rank_zero:
                log.warning(
                    "the ranks do not read the same stream: the state of the training data "
                    "differs between them, and rank 0's is saved. Every rank has to read the "
                    "whole stream, and keeps its own micro-batches of it"
                )
        return state

    def steps(self) -> Generator[StepWork, None, None]:
        """The steps; close it when no more are wanted."""
        weight = self._task.sample_weight
        if weight is not None:
            return self._yield_known_weights(weight)
        return self._yield_asked_weights()

    def _yield_known_weights(self, weight: float) -> Generator[StepWork, None, None]:
        try:
            yield from self._move.in_turn(self._with_known(weight))
        finally:
            self._loaded.close()

    def _with_known(self, weight: float) -> Iterator[StepWork]:
        move, moves = self._move, self._move.moves
        for (epoch, shares, samples, ends_epoch), batches in self._loaded:
            placed = self._places(shares, samples)
            if self._left_out.looks:
                for batch, (ids, _) in zip(batches, shares, strict=True):
                    self._left_out.look(batch, len(ids))
            micro = [
                MicroBatch(move(batch) if moves else batch, counts * weight, key, place)
                for batch, (_, counts), (key, place) in zip(batches, shares, placed, strict=True)
            ]
            yield StepWork(micro, samples * weight, samples, epoch, ends_epoch)

    def _yield_asked_weights(self) -> Generator[StepWork, None, None]:
        """One step ahead: its global weight is reduced while the step before it runs."""
        ahead = None
        try:
            ahead = self._weigh(*next(self._loaded))
            while True:
                following = self._weigh(*next(self._loaded))
                ready, ahead = ahead, following
                yield self._finish(*ready)
        finally:
            if ahead is not None:  # every rank stops here with one reduction under way
                ahead[-1]()
            self._loaded.close()

    def _places(self, shares: list[Share], samples: int) -> list[tuple[int, MicroBatchPlace]]:
        """Seeds of this rank's forwards in the next step, and which micro-batches they are."""
        keys = self._forward_keys
        base = keys.of_step(self._step)
        self._step += 1
        places = self._cut.places(shares, samples, base)
        return [(keys.of_micro_batch(base, place.number), place) for place in places]

    def _weigh(self, plan: StepPlan, batches: list[Any]) -> tuple[Any, ...]:
        micro = []
        placed = self._places(plan.shares, plan.samples)
        for batch, share, (key, place) in zip(batches, plan.shares, placed, strict=True):
            weight = self._weight(batch, share)
            micro.append(MicroBatch(self._move(batch), weight, key, place))
        total = self._comm.begin_sum(sum(one.weight for one in micro))
        return plan, micro, self._move.mark(), total

    def _weight(self, batch: Any, share: Share) -> float:
        """NaN for what is no weight: every rank sees it in the sum, and refuses."""
        if not share.counts:
            return 0.0
        self._left_out.look(batch, len(share.ids))
        with state_samples(len(share.ids)):
            weight = float(self._task.weight(batch))
        return weight if weight >= 0.0 else math.nan

    def _finish(
        self, plan: StepPlan, micro: list[Any], mark: Any, total: Callable[[], float]
    ) -> StepWork:
        weight = total()
        if not 0.0 < weight < math.inf:
            what = f"a whole global batch in epoch {plan.epoch} has weight {weight}"
            if math.isnan(weight):
                what = f"task.weight gave a negative number or NaN in epoch {plan.epoch}"
            raise ConfigError(what, fix="check task.weight: it counts what the loss is a mean over")
        self._move.arrive(mark)
        return StepWork(micro, weight, plan.samples, plan.epoch, plan.ends_epoch)


def eval_batches(
    task: Task,
    split: str,
    loading: Loading,
    cut: BatchPartition,
    comm: Communicator,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[tuple[Any, bool]]:
    """This rank's batches of a split, on the device, each with whether it counts.

    Every rank gets as many. Batch ``g`` of the split goes to rank ``g % dp_size``. ``limit`` is how
    many global batches of training the samples of all ranks together make at most: the same samples
    however a batch is divided. A dataset that is only made now is made under the run's ``seed``.

    Raises:
        ConfigError: the task has no such split, or it is empty.
    """
    dataset = dataset_of(task, split, seed=seed)
    if dataset is None:
        raise ConfigError(
            f"the task has no {split} data",
            fix=f"give task.data a {split} dataset, or drop the stage",
        )
    move = mover_to(comm.device)
    size = loading.eval_batch_size or cut.micro_batch_size
    wide = BatchPartition(size * cut.dp_size, size, cut.dp_size, cut.dp_rank)
    most = None if limit is None else limit * cut.batch_size
    steps: Iterator[tuple[StepPlan, list[Any]]]
    if isinstance(dataset, IterableDataset):
        pin = _pins(loading, comm.device)
        steps = _one_pass(dataset, loading, wide, collate_of(task), pin, most)
    elif len(dataset):
        samples = min(len(dataset), most or len(dataset))
        sampler = GlobalSampler(samples, wide, seed=0, shuffle=False)
        steps = itertools.islice(
            _load_batches(sampler, dataset, collate_of(task), loading, comm.device, 0),
            sampler.steps_per_epoch,
        )
    else:
        raise ConfigError(f"the {split} data is empty", fix="check the data source's options")
    moved = ((plan.shares[0], move(batches[0])) for plan, batches in steps)
    for share, batch in move.in_turn(moved):
        with state_samples(len(share.ids)):
            yield batch, bool(share.counts)


def _one_pass(
    dataset: Any,
    loading: Loading,
    cut: BatchPartition,
    collate: Callable[[list[Any]], Any],
    pin: bool,
    most: int | None,
) -> Loaded:
    """One pass over a stream, or its first ``most`` samples, in the order of one process."""
    if most is not None and most % cut.batch_size:
        dataset, most = _FirstSamples(dataset, most), None
    limit = None if most is None else most // cut.batch_size
    plain = replace(
        loading,
        num_workers=min(loading.workers, 1),
        weighted=False,
        drop_last=False,
        own_state=False,
    )
    stream = Stream(dataset, plain, cut, collate, seed=0, pin=pin, limit=limit, passes=1)
    return stream.steps()


class _FirstSamples(IterableDataset[Any]):
    """The first ``count`` samples of a stream."""

    def __init__(self, stream: IterableDataset[Any], count: int) -> None:
        self._stream, self._count = stream, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._stream), self._count)

    def set_epoch(self, epoch: int) -> None:
        """The stream's own, where it has one."""
        getattr(self._stream, "set_epoch", lambda epoch: None)(epoch)


def in_order_of(
    dataset: Any, loading: Loading, *, seed: int, collate: Callable[[list[Any]], Any]
) -> Iterator[Any]:
    """Batches of a map dataset in the global order of one process, without end.

    The feed without its loop, for a program that has a loop of its own.
    """
    batch = loading.batch_size or DEFAULT_BATCH_SIZE
    sampler = GlobalSampler(
        len(dataset),
        BatchPartition(batch, batch, 1, 0),
        seed,
        shuffle=loading.shuffle,
        drop_last=loading.drop_last,
    )
    device = torch.device("cpu")
    for _, batches in _load_batches(sampler, dataset, collate, loading, device, 0):
        yield batches[0]


def collate_of(task: Task) -> Callable[[list[Any]], Any]:
    """The task's collate, or torch's default."""
    return task.data.collate or stack


def _sampler(
    dataset: Any, loading: Loading, cut: BatchPartition, seed: int, weights: Tensor | None
) -> GlobalSampler:
    size = len(dataset)
    if size < cut.batch_size:
        raise ConfigError(
            f"the training data has {size} samples, and one global batch takes {cut.batch_size}",
            fix=fitting(loading, size, cut.dp_size, cut.batch_size // cut.micro_batch_size),
        )
    if weights is not None and len(weights) > size:
        weights = drawable(weights[:size], "the first sample_weights()")
    return GlobalSampler(
        size, cut, seed, shuffle=loading.shuffle, drop_last=loading.drop_last, weights=weights
    )


def _load_batches(
    sampler: GlobalSampler,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    loading: Loading,
    device: torch.device,
    consumed: int,
) -> Loaded:
    """Plans with their batches, loaded here or by worker processes."""
    fetch = None
    if seeds_samples(dataset, loading):
        fetch = Seeded(dataset, sampler.seed, always=loading.seed_samples is True)
    pin = _pins(loading, device)
    if not loading.workers:
        return _in_process(sampler, fetch or _plain(dataset), collate, bool(fetch), pin, consumed)
    return _by_workers(sampler, fetch or dataset, collate, bool(fetch), pin, loading, consumed)


def _pins(loading: Loading, device: torch.device) -> bool:
    """Whether batches go to page-locked memory."""
    if loading.pin_memory is None:
        return device.type == "cuda"
    if loading.pin_memory and not torch.accelerator.is_available():
        raise ConfigError(
            "data.pin_memory=true, but there is no accelerator here to copy to",
            fix="data.pin_memory=null pins where there is one",
        )
    return loading.pin_memory


def _in_process(
    sampler: GlobalSampler,
    fetch: Any,
    collate: Callable[[Any], Any],
    keyed: bool,
    pin: bool,
    consumed: int,
) -> Loaded:
    get = fetch.__getitems__
    for plan in sampler.plans(consumed):
        shares = plan.shares
        ids = [_keys(plan.epoch, share) for share in shares] if keyed else [s.ids for s in shares]
        batches = [collate(get(some)) for some in ids]
        yield plan, [pinned(batch) for batch in batches] if pin else batches


def _by_workers(
    sampler: GlobalSampler,
    dataset: Any,
    collate: Callable[[Any], Any],
    keyed: bool,
    pin: bool,
    loading: Loading,
    consumed: int,
) -> Loaded:
    # The loader runs ahead of the loop, so the plans wait here for their batches.
    waiting: deque[StepPlan] = deque()

    def keys() -> Iterator[list[Key]]:
        for plan in sampler.plans(consumed):
            waiting.append(plan)
            for share in plan.shares:
                yield _keys(plan.epoch, share) if keyed else list(share.ids)

    loader: Any = DataLoader(
        _Telling(dataset),
        batch_sampler=_Iterable(keys),
        num_workers=loading.workers,
        prefetch_factor=loading.prefetch_factor,
        collate_fn=partial(_unless_failed, collate, pin=pin),
        pin_memory=pin,
    )
    batches = iter(loader)
    while True:
        first = next(batches, _END)
        if first is _END:
            return
        plan = waiting.popleft()
        loaded = [first, *(next(batches) for _ in plan.shares[1:])]
        for batch in loaded:
            if isinstance(batch, Failed):
                raise batch.error
        yield plan, loaded


_END = object()


class _Telling(Dataset[Any]):
    """A map dataset whose errors of ours come back as values."""

    def __init__(self, dataset: Any) -> None:
        self._fetch = _plain(dataset).__getitems__

    def __getitem__(self, key: Any) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: list[Any]) -> Any:
        try:
            return self._fetch(keys)
        except TorshError as error:
            return Failed(error)


def _unless_failed(collate: Callable[[Any], Any], samples: Any, *, pin: bool) -> Any:
    if isinstance(samples, Failed):
        return samples
    try:
        return ToPin(collate(samples)) if pin else collate(samples)
    except TorshError as error:
        return Failed(error)


class _Iterable:
    """A batch sampler from a generator function."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()


def _keys(epoch: int, share: Share) -> list[Key]:
    return [(epoch, index) for index in share.ids]


def seeds_samples(dataset: Any, loading: Loading) -> bool:
    """Whether what a map dataset draws for a sample is seeded for each of them."""
    if loading.seed_samples is not None:
        return loading.seed_samples
    while isinstance(dataset, Subset | _First):
        dataset = dataset.dataset
    return not (hasattr(dataset, "__getitems__") or isinstance(dataset, TensorDataset | Tensor))


class _OneByOne:
    """Batched fetching for a dataset that only knows single samples."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self._dataset[index] for index in ids]


def _plain(dataset: Any) -> Any:
    return dataset if hasattr(dataset, "__getitems__") else _OneByOne(dataset)


class _First:
    """The first samples of a map dataset (``overfit_batches``)."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset = dataset
        self._count = min(count, len(dataset))
        self.__getitems__ = _plain(dataset).__getitems__

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]
