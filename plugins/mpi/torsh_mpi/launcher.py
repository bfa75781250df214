"""The launcher of processes that are an MPI job from the start: ``launcher=mpi``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torsh_mpi.seats import Mpirun, ProcessSlots
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.local import Local
from torsh_trainer.launchers.local_transport import ProcessSlot


@dataclass(frozen=True)
class Mpi(Local):
    """As ``Local``, with mpirun giving the processes their places.

    Everything that ``Local`` promises holds: one error that names the rank, signals that let
    processes save, logs, no orphans. ``mpirun`` None is the one beside this Python, else on the
    PATH. ``bind_to`` is Open MPI's ``--bind-to``. ``mpirun_arguments`` come after ours.
    """

    name = "mpi"

    mpirun: str | None = None
    bind_to: str = "none"
    mpirun_arguments: tuple[str, ...] = ()

    def seats(
        self, count: int, context: LaunchContext
    ) -> AbstractContextManager[Sequence[ProcessSlot]]:
        words = Mpirun(self.mpirun, self.bind_to, tuple(self.mpirun_arguments))
        return ProcessSlots(count, mpirun=words, env=context.env)
