"""Horovod's helpers, as far as scripts use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torsh_trainer.dropin.horovod.torch import mpi_ops
from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
_Item = TypeVar("_Item")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether torch sees a GPU."""
    return mpi_ops.gpu_available(ext_base_name, verbose)


def mpi_built(verbose: bool = False) -> bool:
    """Whether the job communicates by MPI."""
    return mpi_ops.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """True: numbers of the host can always travel by gloo."""
    return mpi_ops.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version where the job communicates by it, else 0."""
    return mpi_ops.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """False."""
    return mpi_ops.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """False."""
    return mpi_ops.ccl_built()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether ``num_rank`` is a power of two."""
    return num_rank != 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[_Item], n: int) -> list[Sequence[_Item]]:
    """``n`` parts of ``items``, of which the first are longer by one where it does not divide."""
    share, more = divmod(len(items), n)
    return [items[i * share + min(i, more) : (i + 1) * share + min(i + 1, more)] for i in range(n)]


def is_iterable(x: Any) -> bool:
    """Whether one can go over ``x``."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
