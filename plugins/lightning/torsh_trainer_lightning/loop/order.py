"""In which order samples come, what a batch weighs, and where random numbers come from.

``LightningOrder`` is Lightning's own answer to all three. ``GlobalOrder`` is that of the trainer's
other tasks (decision 0003): a loader's batch is one of all processes together, each takes its part
of it, and the place in the data is an epoch and a number of batches, on any number of processes.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector, _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from torsh_trainer.checkpoint.setup import WORDS, compare
from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.batch import MicroBatch, Samples
from torsh_trainer.data.batch import MicroBatchPlace as PlaceInStep
from torsh_trainer.data.feed import seeds_samples
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sampler import BatchPartition, ForwardKeys, Orders, is_listed
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Mesh
from torsh_trainer.tasks.base import batch_size_of
from torsh_trainer_lightning.loop.loaders import (
    OR,
    Batches,
    Place,
    SeededDataset,
    check_loader,
    indivisible,
    order_error,
    weights_of,
)
from torsh_trainer_lightning.strategy import EngineStrategy

log = logging.getLogger(__name__)


class LightningOrder:
    """Lightning's own: its samplers, each batch as heavy as the next, one stream of numbers."""

    name = "lightning"
    portable = False
    """Whether a place in the middle of an epoch means the same on any number of processes."""

    weight = 1.0
    """What the loss of the batch at hand weighs in a report, on this process."""

    factor = 1.0
    """By what that loss enters backward, beside Lightning's own share of an accumulation."""

    def check(
        self, module: LightningModule, callbacks: Sequence[Any], flags: Mapping[str, Any]
    ) -> None:
        """Looks at what speaks of an order itself; ``flags`` are those of Lightning's Trainer.

        Raises:
            Unsupported: it speaks of another one.
        """

    def bind_strategy(self, comm: Communicator, precision: Precision) -> EngineStrategy:
        """What Lightning's Trainer takes for its strategy."""
        return EngineStrategy.bind(comm=comm, precision=precision)

    def connector(self, trainer: Any) -> _DataConnector:
        """What gives a trainer's loaders their samplers."""
        return _DataConnector(trainer)

    def begin(self, epochs: _TrainingEpochLoop) -> None:
        """The next batch of training has come."""

    def samples(self, batch: Any, processes: int) -> int:
        """How many samples the batch at hand has, over all processes.

        Raises:
            ConfigError: it does not say.
        """
        return batch_size_of(batch) * processes  # which are of one size in Lightning

    def check_training(self, loaders: CombinedLoader) -> None:
        """Looks at all loaders of training together.

        Raises:
            Unsupported: they cannot be brought into this order.
        """

    def limits(self, loaders: CombinedLoader, limits: list[int | float]) -> list[int | float]:
        """How many batches of each loader an evaluation runs on this process, where Lightning
        would run ``limits``.

        Raises:
            Unsupported: they cannot be brought into this order.
        """
        return limits

    def trains_on(self, index: int) -> bool:
        """Whether batch ``index`` of an epoch counts on this process."""
        return True

    def counts(self, loader: Any, index: int) -> bool:
        """Whether batch ``index`` of a loader of an evaluation counts on this process."""
        return True

    def facts(self, accumulate: int) -> dict[str, Any]:
        """What the order of training follows from, under names of ``checkpoint.setup``; known once
        there is its loader. ``accumulate`` batches make a step."""
        return {}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Takes the order of the run that was saved with these ``facts``."""


class GlobalOrder(LightningOrder):
    """One order of all samples by ``seed`` and epoch, cut over processes by position.

    The gradient of a step is the mean over its samples; a forward draws by (``seed``, step, place
    of the sample in it), and a dataset by (``seed``, epoch, sample).
    """

    name = "ours"
    portable = True

    def __init__(self, mesh: Mesh, *, seed: int) -> None:
        self._mesh = mesh
        self._seed = seed
        self._keys = ForwardKeys(seed)
        self._training: Batches | None = None
        self._orders = partial(Orders, 0, seed=seed, shuffle=False)
        self._listed: bool | None = None
        self._facts: dict[str, Any] = {}
        self._total = 0

    def check(
        self, module: LightningModule, callbacks: Sequence[Any], flags: Mapping[str, Any]
    ) -> None:
        if not flags["use_distributed_sampler"]:
            raise order_error(
                "task.use_distributed_sampler=false",
                "leave it out: each process is given its part of every batch",
            )
        for callback in callbacks:
            if isinstance(callback, BatchSizeFinder):
                raise order_error(
                    f"{type(callback).__name__} in task.callbacks, since the batch size is that of "
                    "all processes",
                    "leave it out, and set the loader's batch_size",
                )
        for step in ("training_step", "validation_step", "test_step"):
            if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
                raise order_error(
                    f"{step}(dataloader_iter), which takes batches as it likes",
                    f"write {step}(self, batch, batch_idx), {OR}",
                )

    def bind_strategy(self, comm: Communicator, precision: Precision) -> EngineStrategy:
        made = OrderedStrategy.bind(comm=comm, precision=precision)
        assert isinstance(made, OrderedStrategy)
        made.order = self
        return made

    def connector(self, trainer: Any) -> _DataConnector:
        return _Connector(trainer, self)

    def begin(self, epochs: _TrainingEpochLoop) -> None:
        trainer: Any = epochs.trainer
        batches, index = self._training, epochs.batch_progress.current.ready
        assert batches is not None
        if index >= len(batches):  # nothing has come: the epoch is over
            return
        ranks, every = self._mesh.dp, trainer.accumulate_grad_batches
        first = index - index % every
        last = min(first + every, trainer.num_training_batches)
        mine, self._total = batches.share(index)
        self.weight = float(mine)
        self.factor = mine * ranks * every / batches.samples(first, last)
        number = (index - first) * ranks + self._mesh.dp_rank
        base = self._keys.of_step(epochs._batches_that_stepped)
        micro = batches.cut.micro_batch_size
        # A process without samples runs the first of the batch again.
        samples = Samples(number * micro if mine else 0, mine or min(self._total, micro), base)
        place = PlaceInStep(number, (last - first) * ranks, samples)
        key = self._keys.of_micro_batch(base, number)
        trainer.strategy.engine.draw_for(MicroBatch(None, self.weight, key, place))

    def samples(self, batch: Any, processes: int) -> int:
        return self._total

    def check_training(self, loaders: CombinedLoader) -> None:
        if len(loaders.flattened) != 1:
            raise order_error(
                f"{len(loaders.flattened)} loaders in train_dataloader",
                "give one over a dataset that holds all of them, as torch's StackDataset",
            )

    def limits(self, loaders: CombinedLoader, limits: list[int | float]) -> list[int | float]:
        if loaders._mode != "sequential" and len(loaders.flattened) > 1:
            raise order_error(
                f"a CombinedLoader of mode {loaders._mode} in an evaluation",
                "return the loaders as a list, which are then evaluated one after another",
            )
        return [len(loader) for loader in loaders.flattened]

    def trains_on(self, index: int) -> bool:
        assert self._training is not None
        return self._training.share(index)[0] > 0

    def counts(self, loader: Any, index: int) -> bool:
        return bool(loader.batch_sampler.share(index)[0])

    def facts(self, accumulate: int) -> dict[str, Any]:
        if not self._facts:  # nothing trains
            return {}
        assert self._training is not None
        batch: int = self._facts["batch_size"]
        facts = {f"data.{name}": fact for name, fact in self._facts.items()}
        facts |= {f"data.{name}": fact for name, fact in self._training.orders.state.items()}
        return {**facts, "data.batch_size": batch * accumulate, "trainer.accumulate": accumulate}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        self._listed = is_listed({"order": saved.get("data.order")}, 1)
        if self._training is not None:
            self._training.orders = self._orders(listed=self._listed)

    # -- loaders --------------------------------------------------------------------------------

    def place_loader(self, loader: Any, trainer: Any, mode: RunningStage) -> DataLoader[Any]:
        """``loader`` with its samples in this order, and else as it is; a copy.

        Raises:
            Unsupported: it has an order of its own that would be lost.
        """
        name = f"{mode.dataloader_prefix}_dataloader"
        check_loader(loader, name)
        size, batch = len(loader.dataset), int(loader.batch_size)
        kept = size // batch * batch if loader.drop_last else size
        ranks, rank = self._mesh.dp, self._mesh.dp_rank
        trains = mode == RunningStage.TRAINING
        if trains:
            if batch % ranks:
                raise indivisible(name, batch, ranks)
            cut, place = BatchPartition(batch, batch // ranks, ranks, rank), _place_of(trainer)
        else:
            limit = getattr(trainer, f"limit_{mode.dataloader_prefix}_batches")
            kept = min(kept, batch * int(_parse_num_batches(mode, math.ceil(kept / batch), limit)))
            cut, place = BatchPartition(batch * ranks, batch, ranks, rank), None
        keyed, weights = seeds_samples(loader.dataset, Loading()), weights_of(loader)
        shuffle = type(loader.sampler) is RandomSampler
        orders = partial(Orders, size, seed=self._seed, shuffle=shuffle, weights=weights)
        batches = Batches(
            orders(listed=self._listed if trains else None),
            cut,
            kept=kept,
            keyed=keyed,
            place=place,
        )
        if trains:
            self._training, self._orders = batches, orders
            self._facts = {
                "samples": size,
                "shuffle": shuffle,
                "weighted": weights is not None,
                "drop_last": bool(loader.drop_last),
                "batch_size": batch,
                "micro_batch_size": cut.micro_batch_size,
            }
        placed = copy.copy(loader)
        # Past torch's guard of these names: whatever else the loader's class has made stays.
        vars(placed).update(sampler=batches, batch_sampler=batches, _iterator=None)
        if keyed:
            vars(placed)["dataset"] = SeededDataset(loader.dataset, self._seed)
        return placed


class OrderedStrategy(EngineStrategy):
    """Weighs losses, and counts samples, as ``order`` says."""

    order: LightningOrder = LightningOrder()

    @property
    def is_distributed(self) -> bool:
        """On one process too: what is logged with ``sync_dist`` may go on on several."""
        return True

    def weigh(self, loss: Tensor) -> Tensor:
        """``loss`` as it enters backward."""
        factor = self.order.factor
        return loss if factor == 1.0 else loss * factor

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any | str | None = "mean"
    ) -> Any:
        """As Lightning's, but that the mean of counts that differ is not cut to a whole number."""
        if isinstance(tensor, Tensor) and reduce_op in ("mean", "avg"):
            tensor = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
        return super().reduce(tensor, group, reduce_op)


class _Connector(_DataConnector):
    """Brings loaders of training and evaluation into an order."""

    def __init__(self, trainer: Any, order: GlobalOrder) -> None:
        super().__init__(trainer)
        self._order = order

    def _requires_distributed_sampler(self, dataloader: Any) -> bool:
        return self.trainer.world_size > 1 and super()._requires_distributed_sampler(dataloader)

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if mode == RunningStage.PREDICTING:
            return super()._prepare_dataloader(dataloader, shuffle, mode)
        return self._order.place_loader(dataloader, self.trainer, mode)


def _place_of(trainer: Any) -> Place:
    def place() -> tuple[int, int]:
        frame = trainer.fit_loop
        epoch = frame.epoch_progress.current
        middle = epoch.processed < epoch.ready
        batches = frame.epoch_loop.batch_progress.current.processed if middle else 0
        return epoch.processed, batches

    return place


# -- going on -------------------------------------------------------------------------------------

_BATCHES = ("data.batch_size", "trainer.accumulate")


def check_data(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    middle: bool,
    step: int,
    allow: Sequence[str],
) -> None:
    """Holds the data of training against that of the saved run (see ``LightningOrder.facts``).

    ``middle`` says that it was saved in the middle of an epoch, at ``step``.

    Raises:
        ConfigError: they differ in what is not allowed to.
    """
    comparison = compare(saved, now, allow=allow)
    comparison.check(f"of step {step}")
    if middle and any(saved.get(name) != now.get(name) for name in _BATCHES):
        raise ConfigError(
            "the checkpoint lies in the middle of an epoch of other batches: "
            + ", ".join(f"{name} was {saved[name]} and is {now[name]}" for name in _BATCHES),
            fix="set them as they were, or go on from the end of an epoch",
        )
    for one in comparison.allowed:
        log.warning("%s: allowed, and %s", one.text, WORDS[one.word])
    for text in comparison.inexact:
        log.info("%s", text)
