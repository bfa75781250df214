"""Memory that the members of a group on one host share, each use in its turn among collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from torsh_mpi.channel import Channel
from torsh_mpi.lane import Call, Lane
from torsh_mpi.numbers import AVG, SUM
from torsh_mpi.parts import Parts

_Made = TypeVar("_Made")
_KINDS = {"sum": SUM, "mean": AVG}


class GroupMemory:
    """``SharedMemory`` of ``torsh_trainer.comm``, over a channel. Every method is collective."""

    def __init__(self, lane: Lane, channel: Channel) -> None:
        self._lane = lane
        self._channel = channel

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` zeros that members on one host can all reach; elsewhere plain ones.

        The tensor, and a part of it that is the same on every rank, is reduced where it lies,
        without a copy.
        """
        return self._run("shared_zeros", lambda: self._channel.zeros(count, dtype))

    def shares(self, count: int) -> bool:
        """Whether members reach each other's ``zeros`` of so many elements."""
        return self._run("shares", lambda: self._channel.shares(count))

    def make_stage(self, count: int, dtype: torch.dtype) -> None:
        """Has tensors of so many elements, wherever they lie, reduced in shared memory.

        Takes as much memory as the largest of them for as long as the group lives.
        """
        self._run("make_stage", lambda: self._channel.stage(count, dtype))

    def parts(
        self, sizes: Sequence[int], dtype: torch.dtype, *, op: Literal["sum", "mean"] = "sum"
    ) -> LaneParts | None:
        """What members on one host reduce in parts, while these become ready; elsewhere None."""
        made = self._run("parts", lambda: self._channel.parts(sizes, dtype, _KINDS[op]))
        return None if made is None else LaneParts(made, self._lane)

    def common(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """``count`` zeros in one memory of all members on one host; elsewhere None."""
        return self._run("common_zeros", lambda: self._channel.common(count, dtype))

    def _run(self, name: str, work: Callable[[], _Made]) -> _Made:
        made: list[_Made] = []
        self._lane.run(Call(name, lambda: made.append(work()), ()))
        return made[0]


class LaneParts:
    """``Parts`` whose round ends in its turn among a group's collectives."""

    def __init__(self, parts: Parts, lane: Lane) -> None:
        self.put = parts.put
        self._end = Call("all_reduce", parts.finish, ())
        self._lane = lane

    def wait(self) -> None:
        """Returns when what was put is the reduction of what all members have put."""
        self._lane.run(self._end)
