"""Parameters that FSDP2 cannot cut: every process holds them whole, and their gradients are summed.

FSDP2 cuts along a dimension, and reduces a unit's gradients in one dtype.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.reducer import BucketReducer
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.trainability import Change, change_error

log = logging.getLogger(__name__)


def find_uncut(model: nn.Module, units: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """The parameters that are not to be cut, and why; ``units`` are all modules to be sharded.

    Of a unit's parameters that train, those of the dtype that most of its elements have are cut.
    """
    found: dict[nn.Parameter, str] = {}
    for parameter in model.parameters():
        if parameter.dim() == 0:
            found[parameter] = "without dimensions"
        elif not parameter.numel():
            found[parameter] = "without elements"
        elif parameter.is_complex():
            found[parameter] = "complex"
    for own in parameters_by_unit(units).values():
        trained = [p for p in own if p.requires_grad and p not in found]
        elements: Counter[torch.dtype] = Counter()
        for parameter in trained:
            elements[parameter.dtype] += parameter.numel()
        if len(elements) > 1:
            main = elements.most_common(1)[0][0]
            found.update({p: f"{p.dtype} beside {main}" for p in trained if p.dtype != main})
    return found


def parameters_by_unit(units: Sequence[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """Whose parameters FSDP2 will cut with which unit: the innermost one's."""
    taken: set[nn.Parameter] = set()
    found: dict[nn.Module, list[nn.Parameter]] = {}
    for unit in sorted(units, key=lambda unit: sum(1 for _ in unit.modules())):
        found[unit] = [p for p in unit.parameters() if p not in taken]
        taken.update(found[unit])
    return found


class Uncut:
    """``parameters`` by name, whole on every member of ``comm``, with the sum of their gradients.

    ``dtype`` says in what gradients of a dtype are summed.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        dtype: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        self._parameters = dict(parameters)
        self._comm = comm
        self._dtype = dtype
        self._reducer: BucketReducer | None = None
        self.follow()

    def follow(self) -> None:
        """Looks anew which of them train."""
        self.close()
        trained = [p for p in self._parameters.values() if p.requires_grad]
        if trained and self._comm.size > 1:
            # After the backward: all processes have begun all that FSDP2 reduces by then.
            self._reducer = BucketReducer(
                trained, self._comm, dtype=self._dtype, overlap=False, find_unused=True
            )

    def reduce(self, *, averages: bool) -> None:
        """Sums gradients over ranks, or averages them; one that no rank has stays None."""
        if self._reducer is not None:
            self._reducer.factor = 1.0 / self._comm.size if averages else 1.0
            self._reducer.finish()

    def mix_shards(self) -> AbstractContextManager[None]:
        """Within, an operation over several tensors may have shards and these among them."""
        return _mix_shards() if self._parameters else contextlib.nullcontext()

    def close(self) -> None:
        """Lets go of what sums gradients."""
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None


@contextlib.contextmanager
def _mix_shards() -> Iterator[None]:
    # Imported here: torch.distributed.tensor costs every other strategy's start-up.
    from torch.distributed.tensor.experimental import implicit_replication

    with implicit_replication():
        yield


def check_one_dtype(knobs: Strategy, change: Change, unit: Any) -> None:
    """Makes sure that in FSDP2's ``unit`` parameters of one dtype train, after ``change``.

    Raises:
        Unsupported: of several.
    """
    trained = [part.sharded_param for part in unit.fsdp_params if part.sharded_param.requires_grad]
    if len({p.dtype for p in trained}) > 1:
        raise change_error(
            knobs, change, use="use strategy=ddp: in their unit others of another dtype train"
        )


def tell(names: Mapping[nn.Parameter, str], why: Mapping[nn.Parameter, str]) -> None:
    """One line of log on what is not cut."""
    if why:
        few = [f"{names[p]} ({reason})" for p, reason in list(why.items())[:6]]
        log.warning(
            "%d parameters with %d elements are whole on every process, not cut: %s%s",
            len(why),
            sum(p.numel() for p in why),
            ", ".join(few),
            ", ..." if len(why) > len(few) else "",
        )
