"""Evaluation under engines whose ranks make every forward together, with batches for some alone.

Where a model is cut over the ranks, a forward gathers it from all of them. A rank whose batches
have run out goes on with its last one, and what comes of that is undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import (
    _DataFetcher,
    _DataLoaderIterDataFetcher,
    _PrefetchDataFetcher,
)
from torch import Tensor, nn

from torsh_trainer.checkpoint.rng import rng_state, set_rng_state
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, Unsupported

_OF_MODULES = frozenset(vars(nn.Module()))


class Together:
    """How many forwards the ranks make in one pass over their loaders.

    Every rank has the same answers from ``begin`` on: from the lengths of the loaders, or by asking
    after each forward where a rank does not know its length.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._surplus = 0
        self._asks = False

    def begin(self, fetcher: _DataFetcher) -> None:
        """A pass begins; collective.

        Raises:
            ConfigError: a rank has no batch to go on with, while others have some.
            Unsupported: a step takes its batches itself, and ranks may have unequal numbers.
        """
        if any(sized_len(loader) is None for loader in fetcher.combined_loader.flattened):
            _look_ahead(fetcher)
        empty = fetcher.done and not getattr(fetcher, "batches", ())
        told = self._comm.all_gather_object((fetcher.length, empty))
        lengths = [length for length, _ in told]
        idle = [rank for rank, (_, empty) in enumerate(told) if empty]
        if 0 < len(idle) < len(told):
            raise ConfigError(
                f"rank {idle[0]} has no batch to evaluate, and the model is cut over the ranks: "
                "all of them take part in every forward",
                fix="give every rank a batch, or evaluate with fewer processes or strategy=ddp",
            )
        unequal = None in lengths or len(set(lengths)) > 1
        if unequal and isinstance(fetcher, _DataLoaderIterDataFetcher):
            raise Unsupported(
                "a model that is cut over the ranks cannot be evaluated by a step that takes "
                "dataloader_iter, where ranks may have unequal numbers of batches",
                fix="take batch and batch_idx, or give loaders of one length",
            )
        self._asks = None in lengths
        self._surplus = 0 if self._asks else max(lengths) - (fetcher.length or 0)

    def rest(self, *, last: bool) -> Iterator[None]:
        """After each forward of a rank's own: once for every forward that it has no batch for.

        ``last`` says that its batches have run out.
        """
        if not self._asks:
            yield from [None] * (self._surplus if last else 0)
            return
        others_go_on = self._anybody(not last)
        while last and others_go_on:
            yield
            others_go_on = self._anybody(False)

    def _anybody(self, goes_on: bool) -> bool:
        return bool(self._comm.reduce_values([float(goes_on)], op="max")[0])


def _look_ahead(fetcher: _DataFetcher) -> None:
    """Has ``fetcher`` know its last batch, also where a limit stands for an unknown length."""
    if fetcher.length is None:
        return
    fetcher.length = None
    if isinstance(fetcher, _PrefetchDataFetcher):
        with contextlib.suppress(StopIteration):
            fetcher.batches.append(_DataFetcher.__next__(fetcher))


@contextlib.contextmanager
def undo(
    module: nn.Module, results: Mapping[str, Any] | None, device: torch.device
) -> Iterator[None]:
    """Within, a step of the module's may do again what it does; then that has not been.

    What it logs (``results``), what its metrics count, what it keeps in attributes and buffers, and
    the random numbers that it draws are as they were. What it does outside, it has done.
    """
    random = rng_state(device)
    logged = {key: dict(vars(entry)) for key, entry in (results or {}).items()}
    attributes = [(vars(each), _copy_attributes(vars(each))) for each in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        set_rng_state(random, device)
        for key, entry in (results or {}).items():
            vars(entry).clear()
            vars(entry).update(logged[key])  # a step logs what it has logged for its own batch
        for own, kept in attributes:
            _put_back(own, kept)
        for buffer, value in buffers:
            buffer.copy_(value)


def _copy_attributes(own: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Attributes that a step may change: each with a copy, where it can be changed in place."""
    kept: dict[str, tuple[Any, Any]] = {}
    for name, value in own.items():
        if name in _OF_MODULES or name.startswith("ds_"):
            continue
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            kept[name] = (value, value.clone())
        elif type(value) in (list, dict, set):
            kept[name] = (value, value.copy())
        elif value is None or isinstance(value, (bool, int, float, str)):
            kept[name] = (value, value)
    return kept


def _put_back(own: dict[str, Any], kept: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (value, copy) in kept.items():
        if type(value) is list:
            value[:] = copy
        elif type(value) in (dict, set):
            value.clear()
            value.update(copy)
        own[name] = copy if isinstance(value, Tensor) else value
