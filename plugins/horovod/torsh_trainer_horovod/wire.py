"""Horovod's collectives, for the compressions of the trainer."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.wire import Wire


class HorovodWire(Wire):
    """As ``Wire``, over Horovod."""

    def __init__(self, comm: Communicator, hvd: Any) -> None:
        super().__init__(comm)
        self._hvd = hvd
        self._busy: set[str] = set()

    def all_reduce(self, tensor: Tensor) -> Any:
        self.count_sum(tensor.numel() * tensor.element_size(), size=self.size)
        name = self._take_name()
        handle = self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum)
        return _Sent(self, name, handle, None)

    def all_gather(self, payload: Tensor) -> tuple[Any, Tensor]:
        self._count((self.size - 1) * payload.numel() * payload.element_size())
        rows = payload.new_empty((self.size, payload.numel()))
        name = self._take_name()
        handle = self._hvd.allgather_async(payload.view(1, -1), name=name)
        return _Sent(self, name, handle, rows), rows

    def finish(self, name: str, handle: Any) -> Tensor:
        """What Horovod gives for ``handle``, waited for."""
        result: Tensor = self._hvd.synchronize(handle)
        self._busy.discard(name)
        return result

    def _take_name(self) -> str:
        """The same on every rank, which start and end their collectives in one order.

        Few names come again and again: Horovod remembers the ranks' agreement about each.
        """
        names = (f"compressed.{number}" for number in itertools.count())
        name = next(name for name in names if name not in self._busy)
        self._busy.add(name)
        return name


class _Sent:
    """A collective under way."""

    def __init__(self, wire: HorovodWire, name: str, handle: Any, rows: Tensor | None) -> None:
        self._wire = wire
        self._name = name
        self._handle = handle
        self._rows = rows

    def wait(self) -> None:
        """Blocks until the operation's tensor holds its result."""
        if self._handle is None:
            return
        result = self._wire.finish(self._name, self._handle)
        self._handle = None
        if self._rows is not None:
            self._rows.copy_(result)
