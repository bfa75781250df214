"""Sets of processes that communicate among themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.negotiation.requests import ALL
from torsh_trainer.dropin.session import session

__getattr__ = refuse_unknown(__name__)

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


class ProcessSet:
    """Ranks that run collectives together; known to Horovod by ``init`` or ``add_process_set``."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: None = None
        try:
            ranks = sorted(ranks_or_comm)
        except TypeError:
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks: communicators of "
                "mpi4py are not there under drop-in"
            ) from None
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm "
                "object"
            )
        self.ranks: list[int] | None = ranks

    def size(self) -> int | None:
        """How many processes it has; None before it is known."""
        if self.process_set_id is None:
            return None
        session.check_on()
        return len(self.ranks or ())

    def rank(self) -> int | None:
        """This process's number in it; None before it is known.

        Raises:
            ValueError: this process is not part of it.
        """
        if self.process_set_id is None:
            return None
        rank = session.comm.rank
        if rank not in (self.ranks or ()):
            raise ValueError("Process is not part of provided process set.")
        assert self.ranks is not None
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Whether this process is part of it."""
        return None if self.ranks is None else session.comm.rank in self.ranks

    def _invalidate(self) -> None:
        self.process_set_id = None

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
global_process_set.process_set_id = ALL

_known: dict[tuple[int, ...], int] = {}


def register_all(process_sets: Sequence[ProcessSet]) -> None:
    """What ``init`` does: the set of all processes, and those that it is given.

    Raises:
        ValueError: a set has a rank that does not exist, or is given twice.
    """
    global_process_set.ranks = list(range(session.comm.size))
    _known.clear()
    _known[tuple(global_process_set.ranks)] = ALL
    for number, each in enumerate(process_sets, start=1):
        if tuple(each.ranks or ()) in _known:
            raise ValueError(
                "Horovod could not be initialized because process_sets entry number "
                f"{number - 1} is a duplicate: {each}"
            )
        _register(each)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a set known after ``init``; every process calls it.

    Raises:
        ValueError: the job is not started with HOROVOD_DYNAMIC_PROCESS_SETS=1, or the set exists.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    session.check_on()
    if os.environ.get(DYNAMIC) != "1":
        raise ValueError(
            f"Set {DYNAMIC}=1 to allow adding process sets after Horovod initialization."
        )
    if tuple(process_set.ranks or ()) in _known:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    _register(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forgets a set; False where it was not known, or is the set of all processes."""
    number = process_set.process_set_id
    if not number:
        return False
    process_set._invalidate()
    return _known.pop(tuple(process_set.ranks or ()), None) is not None


def _register(process_set: ProcessSet) -> None:
    ranks = tuple(process_set.ranks or ())
    size = session.comm.size
    if not ranks or ranks[0] < 0 or ranks[-1] >= size or len(set(ranks)) < len(ranks):
        raise ValueError(f"{process_set} is no set of ranks in 0..{size - 1}")
    process_set.process_set_id = _known[ranks] = session.add_members(ranks)
