"""Compression at work: averages flat buckets of gradients, and keeps what was not sent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.base import Compressing
from torsh_trainer.comm.compression.method import BucketPiece, Draw, Started, are_finite
from torsh_trainer.comm.compression.wire import Traffic, Wire, asks_host, keep_for_stream
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.utils.lookup import matching, no_match

log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Slot(NamedTuple):
    """The ``size`` elements of parameter ``name`` from ``begin`` on in a flat bucket."""

    name: str
    begin: int
    size: int

    @staticmethod
    def row(named_sizes: Sequence[tuple[str, int]]) -> list[Slot]:
        """The slots of parameters that stand one after another."""
        slots, begin = [], 0
        for name, size in named_sizes:
            slots.append(Slot(name, begin, size))
            begin += size
        return slots


class Pending:
    """A bucket on its way."""

    def __init__(self, flat: Tensor, started: Sequence[Started]) -> None:
        self._flat = flat
        self._started = started

    def wait(self) -> Tensor:
        """The bucket, once it holds the mean over ranks."""
        for works, finish in self._started:
            for work in works:
                work.wait()
            finish()
        return self._flat

    def future(self) -> torch.futures.Future[Tensor]:
        """The same for who does not wait; what is left to do is done by a thread of torch's."""
        futures = [work.get_future() for works, _ in self._started for work in works]
        finishes = [finish for _, finish in self._started]

        def finish_all(ended: torch.futures.Future[Any]) -> Tensor:
            _values(ended)  # raises what went wrong on the wire
            for finish in finishes:
                finish()
            return self._flat

        if not futures:
            ended: torch.futures.Future[Tensor] = torch.futures.Future()
            ended.set_result(self.wait())
            return ended
        both = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
        return both.then(finish_all)


class GradientReducer:
    """Averages gradients over the ranks of ``comm`` as ``knobs`` say; one for an engine.

    ``parameters`` (name -> tensor, those that train, on their device) are all that it will be
    handed before an ``add``. Buckets may be cut anyhow and change from step to step: every
    parameter is compressed on its own, so that the result does not depend on it. Ranks hand in the
    same buckets in the same order. Call ``advance`` after each optimizer step. ``wire`` is other
    collectives than torch's.

    Raises:
        ConfigError: a pattern of ``exclude`` matches nothing; there is one process.
        Unsupported: a gradient's dtype cannot be compressed.
    """

    def __init__(
        self,
        knobs: Compressing,
        parameters: Mapping[str, Tensor],
        comm: Communicator,
        *,
        seed: int = 0,
        wire: Wire | None = None,
    ) -> None:
        if comm.process_group is None or comm.size == 1:
            raise ConfigError(
                f"compression={knobs.name}: one process sends no gradients",
                fix="start more with launcher.num_processes, or set compression=none",
            )
        self.knobs = knobs
        self.wire = wire or Wire(comm)
        self._draw = Draw(seed)
        self._method = knobs.method(self.wire, self._draw)
        self._shapes = {name: tensor.shape for name, tensor in parameters.items()}
        self._compressed: dict[str, Tensor] = {}
        self.residuals: dict[str, Tensor] = {}
        self._take(self._choose_parameters(parameters))
        self._unit = 1.0
        self._seen: set[str] = set()  # in this reduction

    def add(self, parameters: Mapping[str, Tensor]) -> None:
        """Is handed these too from here on; those that it knows already keep what they owe.

        Raises:
            Unsupported: a gradient's dtype cannot be compressed.
        """
        new = {name: tensor for name, tensor in parameters.items() if name not in self._shapes}
        self._shapes.update({name: tensor.shape for name, tensor in new.items()})
        self._take(self._compressible(new))

    def _take(self, chosen: Mapping[str, Tensor]) -> None:
        self._compressed.update(chosen)
        if self.knobs.keeps_residual:
            for name, tensor in chosen.items():
                self.residuals[name] = torch.zeros(
                    tensor.numel(), dtype=torch.float32, device=tensor.device
                )

    def _choose_parameters(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for pattern in self.knobs.exclude:
            if not matching(pattern, parameters):
                raise no_match(pattern, parameters, option="compression.exclude")
        chosen = self._compressible(parameters)
        if not chosen:
            log.warning(
                "compression=%s compresses nothing: every parameter is excluded, has fewer than "
                "%d elements, or would not shrink",
                self.knobs.name,
                self.knobs.min_size,
            )
        return chosen

    def _compressible(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        excluded = {
            name for pattern in self.knobs.exclude for name in matching(pattern, parameters)
        }
        chosen = {}
        for name, tensor in parameters.items():
            if name in excluded or tensor.numel() < max(1, self.knobs.min_size):
                continue
            if tensor.dtype not in _DTYPES:
                raise Unsupported(
                    f"compression={self.knobs.name} cannot take gradients in "
                    f"{str(tensor.dtype).removeprefix('torch.')}, and {name} has such",
                    fix="add it to compression.exclude, or set compression=none",
                )
            if self._method.takes(tensor.shape):
                chosen[name] = tensor.detach()
        return chosen

    # -- buckets ---------------------------------------------------------------------------------

    def reduce(self, flat: Tensor, slots: Sequence[Slot]) -> Tensor:
        """``flat`` (1-D, gradients as ``slots`` lie in it) becomes the mean over ranks."""
        return self.start(flat, slots).wait()

    def start(self, flat: Tensor, slots: Sequence[Slot]) -> Pending:
        """As ``reduce``; returns while values travel. ``flat`` is not to be touched until then."""
        self._count_reduction(slots)
        active = self.compressing
        sent = [slot for slot in slots if active and slot.name in self._compressed]
        if not sent:
            return Pending(flat, [self._plain(flat)])
        whole = [slot for slot in slots if slot.name not in self._compressed]
        started = [self._plain_parts(flat, whole)] if whole else []
        with torch.no_grad():
            pieces, poison, give_back = self._pieces(flat, sent)
            started.append(self._method.start(pieces, unit=self._unit, poison=poison))
            give_back()
        return Pending(flat, started)

    def _count_reduction(self, slots: Sequence[Slot]) -> None:
        names = [slot.name for slot in slots]
        if not self._seen.isdisjoint(names):  # once more within this step
            self._seen.clear()
            self._draw.reduction += 1
        self._seen.update(names)

    def _plain(self, flat: Tensor) -> Started:
        # As DDP does without a hook, to the last bit: first divide, and by multiplication.
        flat.mul_(1.0 / self.wire.size)
        return Started([self.wire.all_reduce(flat)], _nothing)

    def _plain_parts(self, flat: Tensor, slots: Sequence[Slot]) -> Started:
        views = [_view(flat, slot) for slot in slots]
        joined = torch.cat(views)
        started = self._plain(joined)

        def finish() -> None:
            keep_for_stream(joined)
            for view, part in zip(views, joined.split([s.size for s in slots]), strict=True):
                view.copy_(part)

        return Started(started.works, finish)

    def _pieces(
        self, flat: Tensor, slots: Sequence[Slot]
    ) -> tuple[list[BucketPiece], Tensor, Callable[[], None]]:
        """What is to be sent; NaN where this rank's gradients are not finite, else 0; what is left
        to do when they are on their way."""
        keeps = self.knobs.keeps_residual
        poison = torch.zeros((), dtype=torch.float32, device=flat.device)
        if keeps or self._method.hides_nonfinite:
            finite = are_finite([_view(flat, slot) for slot in slots])
            poison = torch.where(finite, poison, math.nan)
            if not asks_host(flat):
                return self._mask_pieces(flat, slots, finite, poison)
            if not finite:
                # What is owed stays owed; the step will be skipped, or training ends.
                zeros = [_zeros(flat, slot) for slot in slots]
                return self._alike(flat, slots, zeros, keeps=False), poison, _nothing
        values = [
            self.residuals[slot.name].add_(_view(flat, slot))
            if keeps
            else _view(flat, slot).float()
            for slot in slots
        ]
        return self._alike(flat, slots, values, keeps=keeps), poison, _nothing

    def _mask_pieces(
        self, flat: Tensor, slots: Sequence[Slot], finite: Tensor, poison: Tensor
    ) -> tuple[list[BucketPiece], Tensor, Callable[[], None]]:
        """The same without a look at ``finite``."""
        keeps = self.knobs.keeps_residual
        safe = torch.where(finite, flat, 0.0)
        gradients = [_view(safe, slot) for slot in slots]
        if not keeps:
            values = [gradient.float() for gradient in gradients]
            return self._alike(flat, slots, values, keeps=False), poison, _nothing
        owed = [self.residuals[slot.name] for slot in slots]
        values = list(torch._foreach_add(owed, [g.float() for g in gradients]))

        def give_back() -> None:
            for residual, value in zip(owed, values, strict=True):
                torch.where(finite, value, residual, out=residual)

        return self._alike(flat, slots, values, keeps=True), poison, give_back

    def _alike(
        self, flat: Tensor, slots: Sequence[Slot], values: Sequence[Tensor], *, keeps: bool
    ) -> list[BucketPiece]:
        return [
            self._piece(slot, flat, value, keeps=keeps)
            for slot, value in zip(slots, values, strict=True)
        ]

    def _piece(self, slot: Slot, flat: Tensor, value: Tensor, *, keeps: bool) -> BucketPiece:
        return BucketPiece(slot.name, self._shapes[slot.name], value, _view(flat, slot), keeps)

    # -- steps -----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._draw.step

    @property
    def compressing(self) -> bool:
        """Whether the warm-up is over."""
        return self._draw.step >= self.knobs.warmup_steps

    def advance(self) -> None:
        """An optimizer step has ended."""
        self._draw.step += 1
        self._draw.reduction = 0
        self._seen.clear()

    @property
    def unit(self) -> float:
        """What one stands for in gradients and residuals: the loss scale."""
        return self._unit

    @unit.setter
    def unit(self, unit: float) -> None:
        if unit != self._unit:
            for residual in self.residuals.values():
                residual.mul_(unit / self._unit)
            self._unit = unit

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent and received for gradients, all told."""
        return self.wire.traffic

    # -- state -----------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors."""
        return {
            "name": self.knobs.name,
            "memory": self.knobs.memory,
            "step": self.step,
            "unit": self._unit,
            "world_size": self.wire.size,
        }

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Takes what ``plain_state`` gave; residuals come in its unit."""
        self._draw.step = int(state.get("step", 0))
        self._unit = float(state.get("unit", 1.0))

    def shared_state(self) -> dict[str, Tensor]:
        """Tensors that are the same on every rank, by parameter name (PowerSGD's factors)."""
        return self._method.shared_state()

    def shared_template(self) -> dict[str, Tensor]:
        """``shared_state`` for a checkpoint to fill."""
        return self._method.shared_template(self._compressed)

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes what ``shared_state`` gave."""
        self._method.load_shared_state(dict(state))


def share_of(rank: int, size: int, old_size: int) -> list[tuple[int, float]]:
    """(old rank, factor) of the residuals that make up that of ``rank`` of ``size``.

    What ranks owe to the mean gradient is the mean of their residuals. It stays the same when
    ``old_size`` ranks become ``size``: each takes an equal part of the row of old ones.
    """
    shares = []
    for old in range(rank * old_size // size, -(-(rank + 1) * old_size // size)):
        # Both ranges times size * old_size, so that whole numbers are compared.
        begin = max(rank * old_size, old * size)
        end = min((rank + 1) * old_size, (old + 1) * size)
        shares.append((old, (end - begin) / old_size))
    return shares


def _view(flat: Tensor, slot: Slot) -> Tensor:
    return flat[slot.begin : slot.begin + slot.size]


def _zeros(flat: Tensor, slot: Slot) -> Tensor:
    return flat.new_zeros(slot.size, dtype=torch.float32)


def _values(ended: torch.futures.Future[Any]) -> None:
    value = ended.value()
    if isinstance(value, list):
        for one in value:
            if isinstance(one, torch.futures.Future):
                one.value()


def _nothing() -> None:
    return None
