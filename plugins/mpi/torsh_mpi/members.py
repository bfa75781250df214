"""From ranks to a communicator: which processes of the MPI job are in a group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta

from mpi4py import MPI
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from torsh_mpi.group import MpiGroup
from torsh_trainer.errors import ResourceError

_places: dict[int, int] = {}
"""torch's global rank -> MPI's, as of the last group of all processes."""
_limits: list[timedelta] = []
"""The timeout of that group."""


def join(
    *,
    rank: int,
    size: int,
    ranks: Sequence[int],
    store: Store,
    timeout: timedelta,
    name: str,
) -> MpiGroup:
    """The group of ``ranks``, or of all processes when there are none."""
    if ranks:
        comm = _part(ranks, name)
        if timeout == default_pg_timeout:  # nobody asked for one: the job's holds for its parts
            timeout = _limits[0]
    else:
        comm = _whole(rank, size)
        ranks = range(comm.Get_size())
        _limits[:] = [timeout]
    return MpiGroup(comm, store=store, ranks=list(ranks), name=name, timeout=timeout)


def _whole(rank: int, size: int) -> MPI.Intracomm:
    """All processes, numbered as torch does; as MPI does where torch was told ``0 of 1``.

    Raises:
        ResourceError: torch was told another number of processes than MPI has.
    """
    world = MPI.COMM_WORLD
    told = world.allgather((rank, size))
    if world.Get_size() > 1 and all(each == (0, 1) for each in told):
        told = [(number, world.Get_size()) for number in range(world.Get_size())]
    numbers = [number for number, _ in told]
    if sorted(numbers) != list(range(len(numbers))) or told[0][1] != len(numbers):
        raise ResourceError(
            f"torch was told of {size} processes, and the MPI job has {world.Get_size()}",
            fix="start them with mpirun, launcher=mpi, or srun --mpi=pmix",
        )
    _places.clear()
    _places.update({number: place for place, number in enumerate(numbers)})
    comm = world.Split(0, key=numbers[world.Get_rank()])
    assert isinstance(comm, MPI.Intracomm), "a part of an intracommunicator is one"
    return comm


def _part(ranks: Sequence[int], name: str) -> MPI.Intracomm:
    """Only members call this, so that groups which do not overlap are made side by side."""
    world = MPI.COMM_WORLD.Get_group()
    chosen = world.Incl([_places[rank] for rank in ranks])
    return MPI.COMM_WORLD.Create_group(chosen, tag=zlib.crc32(name.encode()) % 32768)
