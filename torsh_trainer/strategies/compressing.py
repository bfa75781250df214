"""A compression in an engine: refusals, and what of it goes into a checkpoint.

``engine.compression`` holds plain values (``step``, ``unit``, ``world_size``, ...), under
``residual`` the residuals of all ranks, and under ``shared`` what is alike on all of them. A
parameter's residual is one tensor of shape ``[ranks, *shape]``, of which each rank holds its row as
a ``FlatShard``. Where the number of ranks changes, the mean of the rows stays the same (see
``share_of``): that mean is what the ranks together still owe to the gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.base import Compressing, NoCompression
from torsh_trainer.comm.compression.reducer import GradientReducer, share_of
from torsh_trainer.comm.compression.wire import Traffic, Wire
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import Job, Strategy

log = logging.getLogger(__name__)


def compressing(strategy: Strategy, job: Job, comm: Communicator) -> Compressing | None:
    """The knobs by which gradients are to be compressed; None where they travel as they are.

    One process sends nothing: the log says so, and it is None.

    Raises:
        Unsupported: it is a compression that no engine knows, or ``precision.reduce`` says
            otherwise.
    """
    knobs = job.compression
    if isinstance(knobs, NoCompression):
        return None
    if not isinstance(knobs, Compressing):
        raise strategy.refuse(f"compression={knobs.name}", use="set compression=none")
    if comm.size == 1:
        log.warning("compression=%s does nothing here: one process sends no gradients", knobs.name)
        return None
    if job.precision.reduce != "fp32":
        raise Unsupported(
            f"precision.reduce={job.precision.reduce} and compression={knobs.name} both say in "
            "what form gradients travel",
            fix="set precision.reduce=fp32, or compression=none",
            strategy=strategy.name,
        )
    return knobs


def reducer_for(
    knobs: Compressing | None,
    model: nn.Module,
    job: Job,
    comm: Communicator,
    wire: Wire | None = None,
) -> GradientReducer | None:
    """What averages the gradients of ``model``, over ``wire``; None for no compression.

    Raises:
        ConfigError: see ``GradientReducer``.
        Unsupported: an embedding with sparse gradients.
    """
    if knobs is None:
        return None
    modules.refuse_sparse(model, f"compression={knobs.name}", use="set compression=none")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return GradientReducer(knobs, trainable, comm, seed=job.seed, wire=wire)


def compress_buckets(
    reducer: GradientReducer | None, model: nn.Module, *, as_in_memory: bool
) -> CompressedBuckets | None:
    """What an engine has of ``reducer``; None for no compression."""
    return None if reducer is None else CompressedBuckets(reducer, model, as_in_memory=as_in_memory)


class CompressedBuckets:
    """A reducer as an engine has it, with its entries in a checkpoint.

    ``as_in_memory`` says that buckets hold gradients in the order of their parameters' memory, as
    DDP's do, where it is another than that of rows (channels last).
    """

    def __init__(self, reducer: GradientReducer, model: nn.Module, *, as_in_memory: bool) -> None:
        self._reducer = reducer
        self._as_in_memory = as_in_memory
        self._parameters = dict(model.named_parameters())
        self._rank, self._size = reducer.wire.rank, reducer.wire.size
        self._saved_size = self._size

    @property
    def traffic(self) -> Traffic:
        """Bytes of gradients on this rank's wire, all told."""
        return self._reducer.traffic

    def begin(self, unit: float) -> None:
        """Before a backward: residuals are in the units of gradients, which the scale changes."""
        self._reducer.unit = unit

    def advance(self) -> None:
        """An optimizer step has ended."""
        self._reducer.advance()

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Before ``template``: what a checkpoint holds of compression beside tensors."""
        self._saved_size = int(saved.get("world_size", self._size))

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; the rows are the residuals themselves where they can be."""
        return self._entries(self._own_rows(), self._reducer.shared_state())

    def _own_rows(self) -> dict[str, FlatShard]:
        return {
            name: FlatShard(
                name,
                (self._size, *self._parameters[name].shape),
                self._rank * residual.numel(),
                self._row_major(name, residual),
            )
            for name, residual in self._reducer.residuals.items()
        }

    def template(self) -> dict[str, Any]:
        """``state_dict`` for a checkpoint to fill: with the rows that this rank takes over."""
        rows = self._own_rows() if self._saved_size == self._size else self._rows_to_take()
        return self._entries(rows, self._reducer.shared_template())

    def _rows_to_take(self) -> dict[str, FlatShard]:
        rows = [old for old, _ in share_of(self._rank, self._size, self._saved_size)]
        return {
            name: FlatShard(
                name,
                (self._saved_size, *self._parameters[name].shape),
                rows[0] * residual.numel(),
                residual.new_zeros(len(rows) * residual.numel()),
            )
            for name, residual in self._reducer.residuals.items()
        }

    def _entries(
        self, residuals: dict[str, FlatShard], shared: dict[str, Tensor]
    ) -> dict[str, Any]:
        entries = self._reducer.plain_state()
        if residuals:
            entries["residual"] = residuals
        if shared:
            entries["shared"] = shared
        return entries

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes what ``template`` gave, filled; residuals that are not in it begin at zero."""
        reducer, filled = self._reducer, state.get("residual", {})
        missing = sorted(set(reducer.residuals) - set(filled))
        if missing and state:
            log.info("%d residuals begin at zero: %s", len(missing), ", ".join(missing[:4]))
        for name, residual in reducer.residuals.items():
            if name in filled:
                self._take(name, residual, filled[name].tensor)
            else:
                residual.zero_()
        reducer.load_shared_state(state.get("shared", {}))
        reducer.load_plain_state(state)
        self._saved_size = self._size

    def _take(self, name: str, residual: Tensor, rows: Tensor) -> None:
        if rows.data_ptr() == residual.data_ptr():
            return
        shares = share_of(self._rank, self._size, self._saved_size)
        factors = torch.tensor([factor for _, factor in shares], device=residual.device)
        mine = (rows.view(len(shares), -1) * factors.unsqueeze(1)).sum(dim=0)
        self._shape_residual(name, residual).copy_(mine.view(self._parameters[name].shape))

    def _shape_residual(self, name: str, residual: Tensor) -> Tensor:
        """A residual in the shape of its parameter; the same memory."""
        parameter = self._parameters[name]
        if self._as_in_memory:
            return residual.as_strided(parameter.shape, parameter.stride())
        return residual.view(parameter.shape)

    def _row_major(self, name: str, residual: Tensor) -> Tensor:
        """A residual's elements as a checkpoint has them: the same memory where they lie so."""
        return self._shape_residual(name, residual).contiguous().view(-1)
