"""Memory of one host that all members of a communicator reach: what few backends have.

``Communicator.shared_memory`` is a ``SharedMemory``, or None on every member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor


class Parts(Protocol):
    """Tensors that are reduced over members together, each as soon as it can be.

    In each round a member puts all of them, in any order, and then waits.
    """

    def put(self, number: int, values: Tensor) -> None:
        """Takes this member's values of a tensor, of one dimension, for the result to replace."""

    def wait(self) -> Any:
        """Blocks until the results are there; collective."""


class SharedMemory(Protocol):
    """What members do by way of memory that they all reach. Every method is collective.

    There may turn out to be none, as between hosts; all members learn it alike.
    """

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` zeros for a tensor that will be reduced again and again.

        Where ``shares(count)``, it is reduced where it lies, without a copy.
        """

    def shares(self, count: int) -> bool:
        """Whether members reach each other's ``zeros`` of so many elements."""

    def make_stage(self, count: int, dtype: torch.dtype) -> None:
        """Says that tensors of so many elements, wherever they lie, will be reduced often."""

    def parts(
        self, sizes: Sequence[int], dtype: torch.dtype, *, op: Literal["sum", "mean"] = "sum"
    ) -> Parts | None:
        """Tensors of so many elements to be reduced together, again and again.

        None, on every member, where that has no advantage over ``all_reduce``.
        """

    def common(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """``count`` zeros that members have together: what one of them writes, all read.

        None, on every member, where there is no such memory. It has no locks: a barrier lies
        between who writes and who reads.
        """


@runtime_checkable
class SharesMemory(Protocol):
    """A torch.distributed process group whose members may share memory, as a plugin brings it."""

    @property
    def shared_memory(self) -> SharedMemory:
        """How they do."""
