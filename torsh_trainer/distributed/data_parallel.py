"""Data parallel as a wrapper around a module, with ``step``: the guides' class form.

A trainer does not need it: ``strategy=nccl|gloo|mpi`` has the same buckets without a wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.failures import CollectiveArgumentError
from torsh_trainer.comm.model_check import check_alike
from torsh_trainer.comm.reducer import BucketReducer, share
from torsh_trainer.distributed import process_group
from torsh_trainer.distributed.process_group import Group
from torsh_trainer.errors import ConfigError


@dataclass(frozen=True)
class BucketConfig:
    """Knobs of ``DistributedDataParallel``.

    ``bucket_size_mb`` is the size of a gradient bucket in MiB. Gradients are the mean over
    ``gradient_accumulation_steps`` micro-batches and the sum over ``backward_passes_per_step``; the
    model is updated, and communicates, every product of the two. ``overlap_communication`` false
    communicates after the whole backward. ``gradient_compression`` true insists on
    ``with_compression``. ``find_unused_parameters`` allows parameters without a gradient;
    ``static_graph`` promises that every step leaves out the same ones, which are looked for once.
    ``gradient_as_bucket_view`` lets gradients live in the buckets.

    Raises:
        ConfigError: a knob is out of range.
    """

    bucket_size_mb: float = 25.0
    gradient_accumulation_steps: int = 1
    overlap_communication: bool = True
    gradient_compression: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    backward_passes_per_step: int = 1
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        if self.bucket_size_mb <= 0:
            raise ConfigError(
                f"bucket_size_mb={self.bucket_size_mb} is not positive", fix="the default is 25"
            )
        for name in ("gradient_accumulation_steps", "backward_passes_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is below 1", fix="give 1 or more")


class DistributedDataParallel(nn.Module):
    """``module``, with gradients averaged over all ranks while backward goes on.

    ``config`` is a ``BucketConfig``, or a list of device ids as torch's class has it: then the next
    arguments are the output device, whether to share buffers (an empty list is no) and whether to
    allow unused parameters. Every rank starts with rank 0's parameters and buffers. The module's
    state is under ``module.``, as torch's class has it.

    ``optimizer`` is what ``step`` steps; ``max_grad_norm`` bounds the gradient's norm there.

    Raises:
        BackendNotInitialized: there is no process group.
        ConfigError: nothing in the module trains, or an option does not fit it.
        MismatchError: the module of another process is another one.
    """

    def __init__(
        self,
        module: nn.Module,
        config: BucketConfig | Sequence[int] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool | Sequence[Any] = True,
        find_unused_parameters: bool | None = None,
        *,
        device_ids: Sequence[int] | None = None,
        optimizer: Optimizer | None = None,
        group: Group = None,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, BucketConfig):
            device_ids = config if device_ids is None else device_ids
            config = BucketConfig(find_unused_parameters=bool(find_unused_parameters))
        elif find_unused_parameters is not None:
            raise CollectiveArgumentError(
                "find_unused_parameters is given beside a BucketConfig", fix="set it in there"
            )
        self.module = module
        self.config = config
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.compression: Any = None
        """What compresses gradients, with its counts of bytes; None where nothing does."""
        self._broadcast_buffers = bool(broadcast_buffers)
        self._passes = 0  # since the last update
        self._paused = False
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names = {p: name for name, p in named}
        _check_devices([p for _, p in named], device_ids, output_device)
        self._comm: Communicator = process_group.resolve(group).communicator()
        check_alike(module, self._comm)
        share([*module.parameters(), *module.buffers()], self._comm)
        self._reducer = BucketReducer(
            [p for _, p in named],
            self._comm,
            bucket_cap_mb=config.bucket_size_mb,
            overlap=config.overlap_communication,
            finishes=True,
            find_unused=config.find_unused_parameters or config.static_graph,
            static=config.static_graph,
            as_views=config.gradient_as_bucket_view,
            on_finish=self._finish_reductions,
        )
        self._set_factor(config.gradient_accumulation_steps)
        self._take_turn()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, after rank 0's buffers were shared."""
        if self.config.gradient_compression and self.compression is None and self.training:
            raise ConfigError(
                "gradient_compression=True, and nothing says how",
                fix="call with_compression(GradientCompressor().algorithm(TopK(0.01)))",
            )
        if self._broadcast_buffers and self.training and self._reducer.syncs:
            share(self.module.buffers(), self._comm)
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within adds to the gradients of this rank; the next one outside communicates."""
        self._paused = True
        try:
            with self._reducer.without_sync():
                yield
        finally:
            self._paused = False

    def with_optimizer(self, optimizer: Optimizer) -> DistributedDataParallel:
        """Itself, with what ``step`` steps."""
        self.optimizer = optimizer
        return self

    def with_compression(self, compression: Any, *, seed: int = 0) -> DistributedDataParallel:
        """Itself, with gradients compressed by a ``Compression`` or a ``GradientCompressor``.

        Raises:
            ConfigError: it is neither, or one of its knobs does not fit this model.
            Unsupported: a gradient's dtype cannot be compressed.
        """
        # Imported by those who compress: it brings every method along.
        from torsh_trainer.comm.compression.base import Compressing, NoCompression
        from torsh_trainer.comm.compression.reducer import GradientReducer, Slot

        knobs = getattr(compression, "compression", compression)
        if isinstance(knobs, NoCompression):
            return self
        if not isinstance(knobs, Compressing):
            raise ConfigError(
                f"{type(compression).__name__} is no compression",
                fix="give one of torsh_trainer.comm.compression, such as TopK(0.01)",
            )
        parameters = {name: p for p, name in self._names.items()}
        reducer = GradientReducer(knobs, parameters, self._comm, seed=seed)
        slots = [
            Slot.row([(self._names[p], p.numel()) for p in bucket.parameters])
            for bucket in self._reducer.buckets
        ]
        self._reducer.reduce = lambda number, flat: reducer.start(flat, slots[number])
        self.compression = reducer
        self._set_factor(self.config.gradient_accumulation_steps)
        return self

    def step(self, scaler: torch.amp.GradScaler | None = None) -> bool:
        """Ends a micro-batch; updates the model when it was the last one of an update.

        Clips, steps the optimizer and forgets the gradients. ``scaler`` is unscaled, stepped and
        updated. Returns whether the model was updated.

        Raises:
            ConfigError: there is no optimizer, or this is within ``no_sync``.
        """
        if self.optimizer is None:
            raise ConfigError(
                "DistributedDataParallel.step has no optimizer to step",
                fix="pass optimizer=..., or call with_optimizer(...)",
            )
        if self._paused:
            raise ConfigError(
                "step() within no_sync() would apply the gradients of one rank",
                fix="call it after a backward outside of no_sync()",
            )
        self._passes += 1
        if self._passes < self._passes_per_update:
            self._take_turn()
            return False
        self._update(self.optimizer, scaler)
        return True

    def flush(self, scaler: torch.amp.GradScaler | None = None) -> bool:
        """Updates with what an incomplete accumulation has gathered, at the end of an epoch.

        The gradient is the mean over the micro-batches that there were. All ranks call it, after
        equally many of them. Returns whether there were any.

        Raises:
            ConfigError: see ``step``.
        """
        if not self._passes:
            return False
        if self.optimizer is None:
            return self.step(scaler)  # which says what is missing
        self._set_factor(self._passes / self.config.backward_passes_per_step)
        try:
            self._reducer.finish()
        finally:
            self._set_factor(self.config.gradient_accumulation_steps)
        self._update(self.optimizer, scaler)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, and what was accumulated."""
        super().zero_grad(set_to_none)
        self._passes = 0
        self._take_turn()

    def close(self) -> None:
        """Takes the hooks off; the module goes on alone."""
        self._reducer.close()

    # -- details ---------------------------------------------------------------------------------

    @property
    def _passes_per_update(self) -> int:
        return self.config.gradient_accumulation_steps * self.config.backward_passes_per_step

    def _update(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        self._passes = 0
        self._take_turn()

    def _take_turn(self) -> None:
        """Has the next backward communicate when it is the last one before an update."""
        self._reducer.syncs = self._passes + 1 == self._passes_per_update

    def _set_factor(self, micro_batches: float) -> None:
        # What compresses gradients gives their mean over ranks, an all-reduce their sum.
        ranks = 1 if self.compression is not None else self._comm.size
        self._reducer.factor = 1.0 / (micro_batches * ranks)

    def _finish_reductions(self) -> None:
        """After every reduction.

        Raises:
            ConfigError: a parameter has no gradient, and that is not allowed.
        """
        if self.compression is not None:
            self.compression.advance()
        unused = set(self._reducer.unused)
        if unused and not (self.config.find_unused_parameters or self.config.static_graph):
            names = [name for p, name in self._names.items() if p in unused]
            raise ConfigError(
                f"{len(names)} parameters got no gradient: {', '.join(names[:8])}"
                + (", ..." if len(names) > 8 else ""),
                fix="set BucketConfig(find_unused_parameters=True), or freeze them",
                unused=names,
            )


def _check_devices(
    parameters: Sequence[nn.Parameter],
    device_ids: Sequence[int] | None,
    output_device: int | torch.device | None,
) -> None:
    """Refuses devices other than the one on which the module is.

    Raises:
        ConfigError: there are several, or another, or nothing to train.
    """
    if not parameters:
        raise ConfigError(
            "nothing in the module requires a gradient", fix="unfreeze something, or do not wrap it"
        )
    place = parameters[0].device
    wanted = [torch.device("cuda", i) if isinstance(i, int) else i for i in device_ids or ()]
    if output_device is not None:
        wanted.append(
            torch.device("cuda", output_device) if isinstance(output_device, int) else output_device
        )
    for device in wanted:
        if device != place:
            raise ConfigError(
                f"device_ids and output_device name {device}, and the module is on {place}",
                fix="move it there first (model.to(rank)), or leave them out",
            )
