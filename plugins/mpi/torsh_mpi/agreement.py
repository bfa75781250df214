"""Do all members call the same thing? Asked before MPI is given what could hang it.

One small reduction answers it. It is done for the first collectives of every group, in which a
training job shows what it will go on doing; with TORCH_DISTRIBUTED_DEBUG=DETAIL, for all of them.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from torsh_trainer.comm.failures import MismatchError

FIRST = 64
"""How many collectives of a group are checked without being asked for."""


class Agreement:
    """Compares what the members of ``comm`` are about to do."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> None:
        self._comm = comm
        self._ranks = ranks
        self._left = FIRST
        self._always = get_debug_level() == DebugLevel.DETAIL
        self.wanted = True
        """Whether the next collective is to be checked; the same on every member."""

    def check(self, words: str, *, gives: Sequence[int] = (), takes: Sequence[int] = ()) -> None:
        """Returns when every member says ``words``, and what they give is what is taken.

        ``gives[i]`` elements go to member i, and ``takes[i]`` come from it, where sizes may differ.

        Raises:
            MismatchError: on every member, with what each of them is about to do.
        """
        self._left -= 1
        self.wanted = self._always or self._left > 0
        mark = zlib.crc32(words.encode())
        fits = 1
        kinds = array("q", (mark, -mark))
        self._comm.Allreduce(MPI.IN_PLACE, kinds, MPI.MIN)
        same = kinds[0] == -kinds[1]
        if same and gives:
            offered = array("q", bytes(8 * len(gives)))
            self._comm.Alltoall(array("q", gives), offered)
            ours = array("q", (int(list(offered) == list(takes)),))
            self._comm.Allreduce(MPI.IN_PLACE, ours, MPI.MIN)
            fits = ours[0]
        if not same or not fits:
            sizes = f", giving {list(gives)} and taking {list(takes)} elements" if gives else ""
            raise self.mismatch(words + sizes)

    def mismatch(self, words: str) -> MismatchError:
        """The error of members that found out that they differ; called by all of them."""
        said = self._comm.allgather(words)
        told = "; ".join(f"rank {r}: {text}" for r, text in zip(self._ranks, said, strict=True))
        return MismatchError(
            f"the ranks do not do the same: {told}",
            fix="every rank calls the same collectives in the same order, with equal shapes and "
            "dtypes",
            rank=self._ranks[self._comm.Get_rank()],
            operation=words.partition(" ")[0],
        )


def describe_call(name: str, tensor: torch.Tensor | None, *more: object, sized: bool = True) -> str:
    """``all_reduce of 12 float32 sum``: equal on every rank when they fit together."""
    parts = [name]
    if tensor is not None:
        count = f"{tensor.numel()} " if sized else ""
        parts.append(f"of {count}{str(tensor.dtype).removeprefix('torch.')}")
    return " ".join([*parts, *map(str, more)])
