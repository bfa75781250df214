"""How a process leaves MPI: in good order, or at once.

``MPI_Finalize`` waits for all processes. One that fails must not wait for others that wait for it
inside a collective, so it leaves without, and mpirun ends the rest.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys

from mpi4py import MPI

from torsh_mpi.seats import TOLERANT

_broken = False


def broke() -> None:
    """Notes that something failed, so that this process must not wait for the others."""
    global _broken  # noqa: PLW0603 - one MPI a process
    _broken = True


@functools.cache
def can_revoke() -> bool:
    """Whether this MPI lets a thread break off what another waits for (ULFM's revoke)."""
    if os.environ.get(TOLERANT, "").lower() not in ("1", "true", "yes"):
        return False
    return hasattr(MPI.Comm, "Revoke") and MPI.Get_library_version().startswith("Open MPI")


def _leave() -> None:
    failed = getattr(sys, "last_value", None) is not None
    if _broken or failed or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    MPI.Finalize()


def finalise_at_exit() -> None:
    """Arranges the end of MPI, once."""
    atexit.unregister(_leave)
    atexit.register(_leave)
