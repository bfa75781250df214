"""From datasets to steps: loading, weighting, moving to the device."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataset import TensorDataset

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.arithmetic import DEFAULT_BATCH_SIZE
from torsh_trainer.data.batch import MicroBatch, Step
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sampler import Cut, ForwardKeys, GlobalSampler, Share, StepPlan, mix
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.task import Task

Key = int | tuple[int, int]


class TrainFeed:
    """Steps from a position on, without end.

    ``consumed`` samples and ``step`` steps lie behind. Weights of a step are known before its
    first backward: from the sampler when every sample weighs the same, else reduced over ranks
    while the step before it runs.
    """

    def __init__(
        self,
        task: Task,
        loading: Loading,
        cut: Cut,
        comm: Communicator,
        *,
        seed: int,
        consumed: int = 0,
        step: int = 0,
        overfit_batches: int | None = None,
    ) -> None:
        self._task = task
        self._comm = comm
        self._cut = cut
        self._forward_keys = ForwardKeys(seed)
        self._step = step
        self._move = _mover(comm.device)
        dataset = task.data.train
        if dataset is None:
            raise ConfigError("the task has no training data", fix="give task.data a train dataset")
        self.steps_per_epoch: int | None = None
        if isinstance(dataset, IterableDataset):
            source = _Stream(dataset, loading, cut, collate_of(task))
            self._loaded = source.steps(consumed, overfit_batches)
            return
        if overfit_batches is not None:
            dataset = _First(dataset, overfit_batches * cut.batch_size)
        sampler = _sampler(task, dataset, loading, cut, seed)
        self.steps_per_epoch = sampler.steps_per_epoch
        self._loaded = _loaded(sampler, dataset, collate_of(task), loading, comm.device, consumed)

    def __iter__(self) -> Iterator[Step]:
        return self.steps()

    def steps(self) -> Generator[Step, None, None]:
        """The steps; close it when no more are wanted."""
        weight = self._task.sample_weight
        if weight is not None:
            return self._known_weights(weight)
        return self._asked_weights()

    def _known_weights(self, weight: float) -> Generator[Step, None, None]:
        move, keys = self._move, self._keys
        for (epoch, shares, samples, ends_epoch), batches in self._loaded:
            micro = [
                MicroBatch(move(batch), counts * weight, key)
                for batch, (_, counts), key in zip(batches, shares, keys(len(shares)), strict=True)
            ]
            yield Step(micro, samples * weight, samples, epoch, ends_epoch)

    def _asked_weights(self) -> Generator[Step, None, None]:
        """One step ahead: its global weight is reduced while the step before it runs."""
        ahead = self._weigh(*next(self._loaded))
        try:
            while True:
                following = self._weigh(*next(self._loaded))
                ready, ahead = ahead, following
                yield self._finish(*ready)
        finally:  # every rank stops here with one reduction under way
            ahead[-1].wait()

    def _keys(self, count: int) -> list[int]:
        """Seeds of this rank's forwards in the next step."""
        keys, rank = self._forward_keys, self._cut.dp_rank
        base = keys.of_step(self._step)
        self._step += 1
        if count == 1:
            return [keys.of_micro_batch(base, rank)]
        return [keys.of_micro_batch(base, i * self._cut.dp_size + rank) for i in range(count)]

    def _weigh(self, plan: StepPlan, batches: list[Any]) -> tuple[Any, ...]:
        micro = []
        keys = self._keys(len(plan.shares))
        for batch, share, key in zip(batches, plan.shares, keys, strict=True):
            weight = float(self._task.weight(batch)) if share.counts else 0.0
            micro.append(MicroBatch(self._move(batch), weight, key))
        total = torch.tensor([sum(one.weight for one in micro)], dtype=torch.float64)
        total = self._comm.place(total)
        work = self._comm.all_reduce(total, async_op=True)
        return plan, micro, total, work

    def _finish(self, plan: StepPlan, micro: list[Any], total: Tensor, work: Any) -> Step:
        work.wait()
        weight = float(total.item())
        if weight <= 0.0:
            raise ConfigError(
                f"a whole global batch in epoch {plan.epoch} has weight {weight}",
                fix="check task.weight: it counts what the loss is a mean over",
            )
        return Step(micro, weight, plan.samples, plan.epoch, plan.ends_epoch)


def eval_batches(
    task: Task,
    split: str,
    loading: Loading,
    cut: Cut,
    comm: Communicator,
    *,
    limit: int | None = None,
) -> Iterator[tuple[Any, bool]]:
    """This rank's batches of a split, on the device, each with whether it counts.

    Every rank gets as many; ``limit`` bounds them. Batch ``g`` of the split goes to rank
    ``g % dp_size``.

    Raises:
        ConfigError: the task has no such split, or it is empty.
    """
    dataset = getattr(task.data, split)
    if dataset is None:
        raise ConfigError(
            f"the task has no {split} data",
            fix=f"give task.data a {split} dataset, or drop the stage",
        )
    move = _mover(comm.device)
    size = loading.eval_batch_size or cut.micro_batch_size
    wide = Cut(size * cut.dp_size, size, cut.dp_size, cut.dp_rank)
    if isinstance(dataset, IterableDataset):
        stream = _Stream(dataset, loading, wide, collate_of(task))
        passed = itertools.takewhile(lambda item: item[0].epoch == 0, stream.steps(0, None))
        for plan, batches in itertools.islice(passed, limit):
            yield move(batches[0]), bool(plan.shares[0].counts)
        return
    if not len(dataset):
        raise ConfigError(f"the {split} data is empty", fix="check the data source's options")
    sampler = GlobalSampler(len(dataset), wide, seed=0, shuffle=False)
    steps = itertools.islice(
        _loaded(sampler, dataset, collate_of(task), loading, comm.device, 0),
        min(sampler.steps_per_epoch, limit or sampler.steps_per_epoch),
    )
    for plan, batches in steps:
        yield move(batches[0]), bool(plan.shares[0].counts)


def in_order_of(
    dataset: Any, loading: Loading, *, seed: int, collate: Callable[[list[Any]], Any]
) -> Iterator[Any]:
    """Batches of a map dataset in the global order of one process, without end.

    The feed without its loop, for a program that has a loop of its own.
    """
    batch = loading.batch_size or DEFAULT_BATCH_SIZE
    sampler = GlobalSampler(
        len(dataset),
        Cut(batch, batch, 1, 0),
        seed,
        shuffle=loading.shuffle,
        drop_last=loading.drop_last,
    )
    device = torch.device("cpu")
    for _, batches in _loaded(sampler, dataset, collate, loading, device, 0):
        yield batches[0]


def collate_of(task: Task) -> Callable[[list[Any]], Any]:
    """The task's collate, or torch's default."""
    return task.data.collate or default_collate


def _sampler(task: Task, dataset: Any, loading: Loading, cut: Cut, seed: int) -> GlobalSampler:
    size = len(dataset)
    if size < cut.batch_size:
        raise ConfigError(
            f"the training data has {size} samples, and one global batch takes {cut.batch_size}",
            fix=f"set data.batch_size={max(size, 1)} or less" if size else "check the data source",
        )
    weights = task.data.sample_weights() if loading.weighted else None
    if loading.weighted and weights is None:
        raise ConfigError(
            "data.weighted=true, but the data source gives no sample weights",
            fix="define sample_weights() on it, or set data.weighted=false",
        )
    return GlobalSampler(
        size, cut, seed, shuffle=loading.shuffle, drop_last=loading.drop_last, weights=weights
    )


def _loaded(
    sampler: GlobalSampler,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    loading: Loading,
    device: torch.device,
    consumed: int,
) -> Iterator[tuple[StepPlan, list[Any]]]:
    """Plans with their batches, loaded here or by worker processes."""
    fetch = _seeded(dataset, loading, sampler.seed)
    pin = device.type == "cuda" if loading.pin_memory is None else loading.pin_memory
    if not loading.num_workers:
        return _in_process(sampler, fetch or _plain(dataset), collate, bool(fetch), pin, consumed)
    return _by_workers(sampler, fetch or dataset, collate, bool(fetch), pin, loading, consumed)


def _in_process(
    sampler: GlobalSampler,
    fetch: Any,
    collate: Callable[[Any], Any],
    keyed: bool,
    pin: bool,
    consumed: int,
) -> Iterator[tuple[StepPlan, list[Any]]]:
    get = fetch.__getitems__
    for plan in sampler.plans(consumed):
        shares = plan.shares
        ids = [_keys(plan.epoch, share) for share in shares] if keyed else [s.ids for s in shares]
        batches = [collate(get(some)) for some in ids]
        yield plan, [pin_memory(batch) for batch in batches] if pin else batches


def _by_workers(
    sampler: GlobalSampler,
    dataset: Any,
    collate: Callable[[Any], Any],
    keyed: bool,
    pin: bool,
    loading: Loading,
    consumed: int,
) -> Iterator[tuple[StepPlan, list[Any]]]:
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
        num_workers=loading.num_workers,
        prefetch_factor=loading.prefetch_factor,
        collate_fn=partial(_unless_failed, collate),
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
            if isinstance(batch, _Failed):
                raise batch.error
        yield plan, loaded


_END = object()


class _Failed:
    """An error of ours on its way out of a loader process.

    Raised there, it would arrive with a traceback inside its sentence.
    """

    def __init__(self, error: TorshError) -> None:
        self.error = error


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
            return _Failed(error)


def _unless_failed(collate: Callable[[Any], Any], samples: Any) -> Any:
    return samples if isinstance(samples, _Failed) else collate(samples)


class _Iterable:
    """A batch sampler from a generator function."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()


def _keys(epoch: int, share: Share) -> list[Key]:
    return [(epoch, index) for index in share.ids]


class Seeded:
    """A map dataset whose random numbers for a sample come from (seed, epoch, sample id)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed = mix(self.seed, epoch, index)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        return self.dataset[index]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        return [self[key] for key in keys]


def _seeded(dataset: Any, loading: Loading, seed: int) -> Seeded | None:
    wanted = loading.seed_samples
    if wanted is None:
        inner = dataset
        while isinstance(inner, Subset | _First):
            inner = inner.dataset
        wanted = not (hasattr(inner, "__getitems__") or isinstance(inner, TensorDataset))
    return Seeded(dataset, seed) if wanted else None


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


class _Stream:
    """Steps out of an IterableDataset.

    Every rank reads the whole stream and keeps its micro-batches, so that the order stays global;
    an epoch is one pass.
    """

    def __init__(
        self,
        dataset: Any,
        loading: Loading,
        cut: Cut,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        for option, wanted in (
            ("weighted", loading.weighted),
            ("num_workers", loading.num_workers),
        ):
            if wanted:
                raise ConfigError(
                    f"data.{option} is not possible over an iterable dataset",
                    fix="give the task a map-style dataset, or leave the option out",
                )
        self._dataset = dataset
        self._cut = cut
        self._collate = collate
        self._drop_last = loading.drop_last

    def steps(
        self, consumed: int, overfit_batches: int | None
    ) -> Iterator[tuple[StepPlan, list[Any]]]:
        for epoch in itertools.count():
            samples = iter(self._dataset)
            if overfit_batches is not None:
                samples = itertools.islice(samples, overfit_batches * self._cut.batch_size)
            passed = 0
            for block, last in self._blocks(samples):
                passed += len(block)
                if consumed >= passed:
                    continue
                shares = self._cut.shares(list(range(len(block))))
                batches = [self._collate([block[i] for i in share.ids]) for share in shares]
                yield StepPlan(epoch, shares, len(block), last), batches
            if not passed:
                raise ConfigError("the iterable dataset is empty", fix="check the data source")
            consumed = max(0, consumed - passed)

    def _blocks(self, samples: Iterator[Any]) -> Iterator[tuple[list[Any], bool]]:
        size = self._cut.batch_size
        block = list(itertools.islice(samples, size))
        while block:
            following = list(itertools.islice(samples, size))
            short = self._drop_last and len(following) < size
            if not (self._drop_last and len(block) < size):
                yield block, not following or short
            block = following


def _mover(device: torch.device) -> Callable[[Any], Any]:
    """Moves every tensor of a batch to the device; nothing at all on a CPU."""
    if device.type == "cpu":
        return lambda batch: batch

    def to_device(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return lambda batch: tree_map(to_device, batch)
