"""Buffers that a training forward changes, so that they depend on no number of processes.

The running statistics of BatchNorm are a linear recurrence over micro-batches,
``r <- (1 - momentum) * r + momentum * b``. Every rank follows it for its own micro-batches, and
lets its distance from the common start fade for those of others; where the statistics are needed,
one sum over ranks gives what one process would have that had run all micro-batches in order:

    r = start + sum over ranks of (1 - momentum) ** (micro-batches since the rank's last) * distance

Nothing is sent in a step. All other buffers that a forward changes are rank 0's in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.reducer import share
from torsh_trainer.data.batch import MicroBatch, MicroBatchPlace
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.strategies.sync_batchnorm import SyncBatchNorm

log = logging.getLogger(__name__)


class BufferSlot(NamedTuple):
    """Where a buffer is held; a forward may put another tensor there."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor | None:
        """The buffer as it is now."""
        return self.module._buffers[self.key]


class RunningAverage:
    """Buffers that follow one linear recurrence, and how far this rank has gone by itself.

    ``module`` gives the momentum, where it has one that may change, and ``count`` is the buffer in
    which it counts its forwards. A momentum of None is the mean over all forwards counted.
    """

    def __init__(
        self,
        slots: Sequence[BufferSlot],
        *,
        momentum: float | None = None,
        module: nn.Module | None = None,
        count: BufferSlot | None = None,
    ) -> None:
        self.slots = slots
        self.module = module
        self.count = count
        self.uses = None if count else 1
        """Forwards of the module in one of the model's; None until the first has shown it."""
        self.ran = 0
        """This rank's forwards of the model that have changed it since the start."""
        self._momentum = momentum
        self.start: dict[BufferSlot, Tensor] = {}
        """The values that all ranks began with."""

    @property
    def momentum(self) -> float | None:
        return self._momentum if self.module is None else self.module.momentum  # type: ignore[return-value]

    @property
    def all_slots(self) -> list[BufferSlot]:
        return [*self.slots, *([self.count] if self.count else [])]

    @property
    def updates(self) -> bool:
        """Whether a forward changes it: not once its module is in evaluation mode."""
        return self.module is None or self.module.training

    def begin(self) -> None:
        """All ranks hold the same values now."""
        self.start, self.ran = copy_of(self.all_slots), 0

    def forwards(self) -> int:
        """The module's own count of forwards on this rank since then."""
        if self.count is None or self.count.tensor is None:
            return 0
        return int(self.count.tensor) - self._counted

    def fade(self, others: int) -> list[tuple[Tensor, Tensor, float]]:
        """(buffer, its start, share of the way back) for ``others`` micro-batches elsewhere."""
        left = self._share_left(others)
        if left == 1.0:
            return []
        return [(tensor, start, 1.0 - left) for tensor, start in self._pairs()]

    def distance(self, since: int, forwards: int) -> list[Tensor]:
        """What this rank adds to the sum over ranks, float64, flat; ``since`` its last micro-batch
        others have run as many."""
        weight = self._share_left(since) if self.momentum is not None else self._counted + forwards
        return [(t.double() - s.double()).flatten() * weight for t, s in self._pairs()]

    @torch.no_grad()
    def arrive(self, distances: Sequence[Tensor], forwards: int) -> None:
        """Takes the sum of all ranks' distances, and of their forwards."""
        total = 1 if self.momentum is not None else max(1, self._counted + forwards)
        for (tensor, start), sent in zip(self._pairs(), distances, strict=True):
            tensor.copy_(start.double() + sent.view(start.shape) / total)
        if self.count is not None and self.count.tensor is not None:
            self.count.tensor.fill_(self._counted + forwards)

    def _share_left(self, others: int) -> float:
        """The share of a distance that is left when other ranks have run so many micro-batches."""
        momentum = self.momentum
        return 1.0 if momentum is None else (1.0 - momentum) ** (others * (self.uses or 0))

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each buffer with its start."""
        return [(t, self.start[slot]) for slot in self.slots if (t := slot.tensor) is not None]

    @property
    def _counted(self) -> int:
        return 0 if self.count is None else int(self.start[self.count])


class Buffers:
    """The buffers of a model in training on one of the ranks that see other samples.

    ``averages`` names buffers beside those of BatchNorm that follow the same recurrence once in
    every forward, each with its momentum. With ``shares`` all others that a forward changes are
    rank 0's in every step; without, each rank has its own while it trains. ``part`` tells apart the
    notes of processes that hold other parts of one model.

    Raises:
        ConfigError: ``averages`` names what is no buffer, or a momentum outside 0 to 1.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        shares: bool = True,
        averages: Mapping[str, float] | None = None,
        part: str = "",
    ) -> None:
        self._comm = comm
        self._place = f"{part}rank_{comm.rank}"
        self._alone = comm.size == 1
        self._shares = shares
        self._slots = list(slots_of(model))
        self._synchronised = [m for m in model.modules() if isinstance(m, SyncBatchNorm)]
        self._averages = [*_find_declared(averages or {}, self._slots), *_batch_norms(model)]
        taken = {id(s.tensor) for a in self._averages for s in a.all_slots}
        alike = {id(tensor) for tensor in _find_alike(model)}
        self._kept = [slot for slot in self._slots if id(slot.tensor) not in alike]
        self._others = [slot for slot in self._kept if id(slot.tensor) not in taken]
        self._changing: list[BufferSlot] = []
        self._found: set[str] = set()
        self._look_due, self._looking = bool(self._others), False
        self._alike = False  # the averages have a start that all ranks share
        self._updating: list[bool] = []
        self._fits = False  # a checkpoint has the averages of as many ranks
        self._restart()

    @property
    def changing(self) -> list[str]:
        """Names of what forwards change beside the averages, as far as all ranks know by now."""
        return [slot.name for slot in self._changing]

    def _restart(self) -> None:
        """From the values of now, which all ranks share."""
        self._alike = False
        self._own: dict[BufferSlot, Tensor] | None = (
            None  # while those of all ranks are in their place
        )
        self._placed = False  # micro-batches since have said which they are
        self._behind = 0  # micro-batches, of all ranks, in the steps since
        self._in_step = 0  # and in the step at work
        self._last = -1  # which of them was this rank's last

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """After ``gather``: what as many ranks go on from bit for bit, each from its own averages.

        ``rows`` has for each buffer a tensor of shape ``[ranks, *shape]``, of which each rank holds
        its row. Empty where there is nothing that the buffers themselves do not say.
        """
        if not self._own:
            return {}
        rank, size = self._comm.rank, self._comm.size
        place = {
            "last": self._last,
            "ran": [average.ran for average in self._averages],
            "uses": [average.uses for average in self._averages],
        }
        rows = {
            slot.name: FlatShard(slot.name, (size, *t.shape), rank * t.numel(), t.reshape(-1))
            for slot, t in self._own.items()
        }
        start = {slot.name: t for a in self._averages for slot, t in a.start.items()}
        behind = self._behind + self._in_step
        common = {"world_size": size, "behind": behind, "start": start, "rows": rows}
        return {**common, "ranks": {self._place: place}}

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Before ``template``: what a checkpoint holds of it beside tensors."""
        self._fits = saved.get("world_size") == self._comm.size

    def template(self) -> dict[str, Any]:
        """``state_dict`` for a checkpoint to fill; empty where that is of other ranks."""
        if not self._fits or self._alone or not self._averages:
            return {}
        self._begin()
        self._own = copy_of(slot for average in self._averages for slot in average.all_slots)
        return self.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes what ``template`` gave, filled; without it all ranks go on from the same."""
        mine = state.get("ranks", {}).get(self._place)
        if mine is None or self._own is None:
            self._restart()
            return
        self._last, self._behind, self._in_step = mine["last"], state["behind"], 0
        for average, ran, uses in zip(self._averages, mine["ran"], mine["uses"], strict=True):
            average.ran, average.uses = ran, uses
            average.start = {slot: state["start"][slot.name] for slot in average.all_slots}
        self._own = {
            slot: state["rows"][slot.name].tensor.view(t.shape) for slot, t in self._own.items()
        }
        self._placed = True

    def _begin(self) -> None:
        for average in self._averages:
            average.begin()
        self._alike = True

    # -- a step ----------------------------------------------------------------------------------

    def begin_step(self, place: MicroBatchPlace | None) -> None:
        """Where a step begins; ``place`` is that of its first micro-batch. Collective."""
        if self._alone:
            return
        self.end_step()
        self._looking, self._look_due = self._look_due, False
        updating = [average.updates for average in self._averages]
        stopped = any(b and not a for b, a in zip(self._updating, updating, strict=False))
        if stopped or (self._behind + self._in_step and self._placed is not (place is not None)):
            self.gather()  # from now on they are read, or shared as all others are
            self._restart()
        self._updating = updating
        if not self._alike:
            self._begin()
        for slot, tensor in (self._own or {}).items():
            _put(slot, tensor)
        self._own = None
        self._placed = place is not None
        self._behind, self._in_step = self._behind + self._in_step, 0
        if self._shares:
            averages = [] if place else [s for a in self._averages for s in a.all_slots]
            share(tensors_of([*self._changing, *averages]), self._comm)

    def before(self, micro: MicroBatch) -> dict[BufferSlot, Tensor] | None:
        """Before a micro-batch: what ``after`` compares with, or puts back after a filler."""
        place = micro.place
        is_filler = place is not None and place.is_filler
        for norm in self._synchronised:
            norm.counts = not is_filler
        if place is not None and is_filler:
            self._in_step = place.of
            return copy_of(self._kept)
        if self._alone:
            return None
        if place is not None:
            self._fade(place)
        return self.look()

    def look(self) -> dict[BufferSlot, Tensor] | None:
        """What the buffers are before a forward, where it is to be seen which ones it changes."""
        if not self._looking:
            return None
        return copy_of(self._others)

    def after(self, micro: MicroBatch | None, held: dict[BufferSlot, Tensor] | None) -> None:
        """After the backward of a micro-batch; ``held`` is what ``before`` gave."""
        place = None if micro is None else micro.place
        if held is not None and place is not None and place.is_filler:
            for norm in self._synchronised:
                norm.counts = True
            for slot, tensor in held.items():  # by .data: a backward may have kept the tensor
                current = slot.tensor
                assert current is not None, "a forward has taken a buffer away"
                current.data.copy_(tensor)
            return
        if held is not None:
            found = [slot.name for slot, old in held.items() if has_changed(slot.tensor, old)]
            self._found.update(found)
        if place is not None and not self._alone:
            for average in self._averages:
                if average.updates:
                    average.ran += 1
                    average.uses = average.uses or average.forwards()

    def end_step(self) -> None:
        """Where a step ends, or the next one begins. Collective."""
        if self._looking:
            self._agree()
        self._looking = False

    def _fade(self, place: MicroBatchPlace) -> None:
        """Lets what this rank knows fade for the micro-batches that others have run since."""
        position = self._behind + place.number
        others = position - self._last - 1
        if others and self._last >= 0:
            faded = [(a, *one) for a in self._averages for one in a.fade(others)]
            if faded:
                of, tensors, starts, weights = (list(column) for column in zip(*faded, strict=True))
                # A backward of BatchNorm reads the batch's statistics, not these: forwards whose
                # backward is still to come (a pipeline's) do not mind that they change.
                unread = [t for a, t in zip(of, tensors, strict=True) if a.module is not None]
                with (
                    torch.no_grad(),
                    _unsafe_preserve_version_counter(tuple(unread)),
                ):
                    torch._foreach_lerp_(tensors, starts, weights)
        self._last, self._in_step = position, place.of

    # -- where all ranks meet --------------------------------------------------------------------

    def gather(self) -> None:
        """The same buffers on every rank: averages of all, rank 0's of the rest. Collective.

        Where the next step begins each rank goes on from averages of its own, so that it does not
        show how often they were gathered.
        """
        if self._alone:
            return
        rest, averaged = list(self._others), [s for a in self._averages for s in a.all_slots]
        if not self._placed:
            rest += averaged
            self._restart()
        elif self._own is None:
            self._own = copy_of(averaged)
            self._combine()
        share(tensors_of(rest), self._comm)
        self._look_due = bool(self._others)

    def _combine(self) -> None:
        """The averages of one process that has run all micro-batches, in their order."""
        if not self._averages:
            return
        since = self._behind + self._in_step - 1 - self._last
        forwards = [average.forwards() for average in self._averages]
        odd = [
            float(average.count is not None and count != (average.uses or 0) * average.ran)
            for average, count in zip(self._averages, forwards, strict=True)
        ]
        sent = [
            average.distance(since, count)
            for average, count in zip(self._averages, forwards, strict=True)
        ]
        numbers = torch.tensor([float(n) for n in [*forwards, *odd]], dtype=torch.float64)
        flat = torch.cat(
            [self._comm.to_device(d) for d in [*(d for s in sent for d in s), numbers]]
        )
        self._comm.all_reduce(flat)
        sizes = [d.numel() for some in sent for d in some]
        parts = iter(flat[: sum(sizes)].split(sizes))
        counts = flat[sum(sizes) :].tolist()
        for average, some, count in zip(self._averages, sent, counts[: len(sent)], strict=True):
            distances = [next(parts).to(d.device) for d in some]
            average.arrive(distances, int(count))
        self._tell_odd(counts[len(sent) :])

    def _tell_odd(self, odd: Sequence[float]) -> None:
        names = [a.slots[0].name for a, flag in zip(self._averages, odd, strict=True) if flag]
        if names and self._comm.world.is_rank_zero:
            log.warning(
                "%s belongs to a module that runs more often in some forwards than in others: its "
                "running statistics are of all ranks, but not to rounding what one process has",
                ", ".join(names),
            )

    def _agree(self) -> None:
        """Which buffers forwards change, the same on every rank, and told once. Collective."""
        found = set().union(*self._comm.all_gather_object(self._found))
        new = [s for s in self._others if s.name in found and s not in self._changing]
        self._changing += new
        if new and self._comm.world.is_rank_zero:
            log.warning(
                "a training forward changes %s: %s. The number of processes may show in the "
                "result; docs/strategies.md, Buffers, has ways out",
                ", ".join(slot.name for slot in new),
                "each step begins with rank 0's" if self._shares else "each process keeps its own",
            )


@torch.no_grad()
def _put(slot: BufferSlot, tensor: Tensor) -> None:
    if slot.tensor is not None:
        slot.tensor.copy_(tensor)


def tensors_of(slots: Iterable[BufferSlot]) -> list[Tensor]:
    """The buffers that are there."""
    return [tensor for slot in slots if (tensor := slot.tensor) is not None]


def copy_of(slots: Iterable[BufferSlot]) -> dict[BufferSlot, Tensor]:
    """Copies of the buffers that are there."""
    return {slot: t.detach().clone() for slot in slots if (t := slot.tensor) is not None}


def slots_of(model: nn.Module) -> Iterator[BufferSlot]:
    """The buffers of a module and those below it, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield BufferSlot(f"{prefix}.{key}" if prefix else key, module, key)


def _batch_norms(model: nn.Module) -> Iterator[RunningAverage]:
    """Those of torch's own BatchNorm; a forward of another's may do otherwise."""
    for prefix, module in model.named_modules():
        own = isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
        if own and module._buffers.get("running_mean") is not None:
            keys = ("running_mean", "running_var", "num_batches_tracked")
            *slots, count = [BufferSlot(f"{prefix}.{key}", module, key) for key in keys]
            yield RunningAverage(slots, module=module, count=count)


def _find_alike(model: nn.Module) -> Iterator[Tensor]:
    """Buffers that every rank changes alike."""
    for module in model.modules():
        if isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm)):
            yield from module.buffers(recurse=False)


def _find_declared(
    averages: Mapping[str, float], slots: Sequence[BufferSlot]
) -> Iterator[RunningAverage]:
    by_name = {slot.name: slot for slot in slots}
    for name, momentum in averages.items():
        if name not in by_name:
            raise ConfigError(
                f"task.running_averages names {name!r}, and the model has no such buffer",
                fix=nearest(name, by_name),
            )
        if not 0.0 < momentum <= 1.0:
            raise ConfigError(
                f"task.running_averages gives {name!r} the momentum {momentum}",
                fix="give the share of a new value, above 0 and at most 1",
            )
        yield RunningAverage([by_name[name]], momentum=momentum)


def has_changed(tensor: Tensor | None, before: Tensor) -> bool:
    """Whether a buffer has another value, shape or dtype than ``before``; NaN equals NaN."""
    if tensor is None or tensor.shape != before.shape or tensor.dtype != before.dtype:
        return True
    same = tensor.detach() == before
    if before.is_floating_point() or before.is_complex():
        same |= (tensor.detach() != tensor.detach()) & (before != before)  # NaN beside NaN
    return not bool(same.all())
