"""The optimizer's state and step, cut over the processes by whole parameters (ZeRO-1).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
Where processes reach one memory the parameters lie in it: each process steps its own there, and no
value is sent. Elsewhere torch's ZeroRedundancyOptimizer sends them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.reducer import like
from torsh_trainer.strategies.rehearsal import refuse_joint
from torsh_trainer.strategies.state import own_attributes

Wrap = Callable[[Optimizer], Optimizer]


def shard_optimizer(comm: Communicator) -> Wrap:
    """What makes torch's ZeroRedundancyOptimizer of an optimizer that may be cut."""

    def wrap(optimizer: Optimizer) -> Optimizer:
        if comm.size > 1:
            refuse_joint(optimizer)
            _close_gaps(p for group in optimizer.param_groups for p in group["params"])
        # Imported here: it pulls in torch.distributed.optim, which no other run needs.
        from torsh_trainer.strategies.packed_zero1 import PackedZeroRedundancyOptimizer

        # Of its class alone torch would make another, from defaults: without what the constructor
        # has put elsewhere, and without hooks.
        def part(groups: list[dict[str, Any]], **_: Any) -> Optimizer:
            return _part(optimizer, [p for group in groups for p in group["params"]])

        return PackedZeroRedundancyOptimizer(
            _groups(optimizer),
            optimizer_class=part,  # type: ignore[arg-type]
            process_group=comm.process_group,
            **optimizer.defaults,
        )

    return wrap


def _close_gaps(parameters: Iterable[nn.Parameter]) -> None:
    """Gives memory of its own to what has gaps there: torch's would send those for elements."""
    for parameter in parameters:
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            parameter.data = parameter.data.clone()


class CommonParameters:
    """``parameters`` in one memory of all members, who each step a share of them.

    Rank 0's values are everybody's. Between a step and the next meeting of all members nobody may
    read a parameter; what a member writes elsewhere, it writes for all, and a meeting ends it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], memory: dict[torch.dtype, Tensor]):
        self._views = dict(_lay_out(parameters, memory))

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], comm: Communicator) -> CommonParameters | None:
        """None, on all members of ``comm``, where they have no such memory; collective."""
        shared = comm.shared_memory
        if shared is None:
            return None
        counts: dict[torch.dtype, int] = defaultdict(int)
        for parameter in parameters:
            counts[parameter.dtype] += parameter.numel()
        memory = {dtype: shared.common(count, dtype) for dtype, count in counts.items()}
        found = {dtype: tensor for dtype, tensor in memory.items() if tensor is not None}
        if len(found) < len(memory):
            return None
        common = cls(parameters, found)
        if comm.world.is_rank_zero:
            for parameter, view in common._views.items():
                view.copy_(parameter.detach())
        comm.barrier()
        common._place()
        return common

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._views

    @contextlib.contextmanager
    def private(self) -> Iterator[None]:
        """Within, this member has parameters of its own, with the same values; then not any more.

        Nobody may step meanwhile.
        """
        self.leave()
        try:
            yield
        finally:
            self._place()

    def leave(self) -> None:
        """Gives this member parameters of its own, with the same values."""
        for parameter, view in self._views.items():
            parameter.data = view.clone()

    def wrap(self, comm: Communicator) -> Wrap:
        """What makes an optimizer of which each member steps its share, where it may be cut."""
        mine = _share(list(self._views), rank=comm.rank, members=comm.size)

        def wrap(optimizer: Optimizer) -> Optimizer:
            refuse_joint(optimizer)
            return StepOfAll(optimizer, mine, comm)

        return wrap

    def _place(self) -> None:
        for parameter, view in self._views.items():
            parameter.data = view


class StepOfAll(Optimizer):
    """An optimizer over parameters that members have together; each steps those in ``mine``.

    ``optim``, which has this member's state, is named as in torch's ZeroRedundancyOptimizer.
    """

    def __init__(self, optimizer: Optimizer, mine: Collection[nn.Parameter], comm: Communicator):
        super().__init__(_groups(optimizer), dict(optimizer.defaults))
        self.optim = _part(optimizer, mine)
        self.state = self.optim.state
        self._comm = comm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Returns when every member has stepped its share; collective."""
        assert closure is None, "a closure would see half of a step"
        pairs = list(zip(self.param_groups, self.optim.param_groups, strict=True))
        for whole, part in pairs:
            part.update(_settings(whole))
        self.optim.step()
        for whole, part in pairs:  # some count their steps there
            whole.update(_settings(part))
        self._comm.barrier()


def _part(optimizer: Optimizer, mine: Collection[nn.Parameter]) -> Optimizer:
    """The same optimizer, over those of its parameters that are in ``mine``.

    Without its constructor, which may want what nobody knows any more.
    """
    own = set(mine)
    part: Optimizer = object.__new__(type(optimizer))
    vars(part).update(own_attributes(optimizer))
    part.state = defaultdict(dict)
    for p in own & set(optimizer.state):  # what the constructor has put there
        part.state[p] = optimizer.state[p]
    part.param_groups = [
        {**_settings(group), "params": [p for p in group["params"] if p in own]}
        for group in optimizer.param_groups
    ]
    return part


def _share(parameters: Sequence[nn.Parameter], *, rank: int, members: int) -> set[nn.Parameter]:
    """The parameters of one member: the largest first, each to whoever has least by then."""
    loads = [0] * members
    share = set()
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        loads[least] += parameter.numel()
        if least == rank:
            share.add(parameter)
    return share


def _lay_out(
    parameters: Sequence[nn.Parameter], memory: dict[torch.dtype, Tensor]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    begin = dict.fromkeys(memory, 0)
    for parameter in parameters:
        start = begin[parameter.dtype]
        begin[parameter.dtype] = start + parameter.numel()
        part = memory[parameter.dtype][start : start + parameter.numel()]
        yield parameter, like(parameter, part)


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {**_settings(group), "params": list(group["params"])} for group in optimizer.param_groups
    ]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}
