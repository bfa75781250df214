"""Compression as a communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.base import Compressing, Compression, NoCompression
from torsh_trainer.comm.compression.reducer import GradientReducer, Slot
from torsh_trainer.comm.torch import TorchCommunicator, world_of
from torsh_trainer.errors import ConfigError, Unsupported


def register(
    ddp: DistributedDataParallel,
    reducer: GradientReducer,
    names: Mapping[int, str],
    *,
    counts_steps: bool = False,
    before: Callable[[Tensor], Tensor] = lambda flat: flat,
) -> None:
    """Lets ``reducer`` average the buckets of ``ddp``; ``names`` maps ``id(parameter)`` to a name.

    ``counts_steps`` takes every backward that communicates for a step; without it somebody calls
    ``reducer.advance()``. ``before`` is what a bucket goes through first.
    """
    hook = _Hook(reducer, names, counts_steps=counts_steps, before=before)
    # Through a lambda: torch compares annotations, and cannot read ours, which are strings.
    ddp.register_comm_hook(hook, lambda hook, bucket: hook(bucket))


class _Hook:
    def __init__(
        self,
        reducer: GradientReducer,
        names: Mapping[int, str],
        *,
        counts_steps: bool,
        before: Callable[[Tensor], Tensor],
    ) -> None:
        self._reducer = reducer
        self._names = names
        self._counts_steps = counts_steps
        self._before = before
        self._ended = False  # a step, with the last bucket of the backward before

    def __call__(self, bucket: Any) -> torch.futures.Future[Tensor]:
        if self._ended:
            self._reducer.advance()
        self._ended = self._counts_steps and bucket.is_last()
        named_sizes = [(self._names[id(p)], p.numel()) for p in bucket.parameters()]
        flat = self._before(bucket.buffer())
        return self._reducer.start(flat, Slot.row(named_sizes)).future()


def attach(
    ddp: DistributedDataParallel,
    compression: Compression | Any,
    *,
    comm: Communicator | None = None,
    seed: int = 0,
) -> GradientReducer | None:
    """Compresses the gradients of a torch ``ddp`` that nobody else drives.

    ``compression`` is a ``Compression`` or a ``GradientCompressor``. Each backward that
    communicates is a step. None is returned for no compression.

    Raises:
        ConfigError: see ``GradientReducer``.
    """
    knobs = getattr(compression, "compression", compression)
    if isinstance(knobs, NoCompression):
        return None
    if not isinstance(knobs, Compressing):
        raise ConfigError(
            f"{type(compression).__name__} is no compression",
            fix="give one of torsh_trainer.comm.compression, such as TopK(0.01)",
        )
    trainable = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
    device = next(iter(trainable.values())).device
    comm = comm or _communicator(ddp.process_group, device)
    reducer = GradientReducer(knobs, trainable, comm, seed=seed)
    names = {id(p): name for name, p in trainable.items()}
    refuse_unused(ddp, knobs)
    register(ddp, reducer, names, counts_steps=True)
    return reducer


def with_compression(
    ddp: DistributedDataParallel, compression: Compression | Any
) -> DistributedDataParallel:
    """``ddp`` itself, after ``attach``."""
    attach(ddp, compression)
    return ddp


def refuse_unused(ddp: DistributedDataParallel, knobs: Compressing) -> None:
    """DDP drops what is sent for a parameter that no rank used; a residual would lose that.

    Raises:
        Unsupported: names both options.
    """
    if ddp.find_unused_parameters and not ddp.static_graph and knobs.keeps_residual:
        raise Unsupported(
            "compression.memory=residual would lose what is owed to a parameter that a step does "
            "not use, under DDP with find_unused_parameters",
            fix="set compression.memory=none, or strategy.overlap=false",
        )


def _communicator(group: Any, device: torch.device) -> Communicator:
    """The members of a group that the user made."""
    world = world_of(group, node=socket.gethostname(), source="torch")
    return TorchCommunicator(world, device, group, timeout_s=1800.0, owned=False)
