"""This process's place in a job that drop-in has started, and its engine while Horovod is on."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.start import create
from torsh_trainer.comm.torch import moves_host_memory
from torsh_trainer.dropin.negotiation.connection import StallCheck
from torsh_trainer.dropin.negotiation.engine import CollectiveEngine, split_host
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError


@dataclass(frozen=True)
class Seat:
    """Who this process is, and how it is to meet the others."""

    world: World
    comm: CommOptions
    stalls: StallCheck


_NOT_ON = "Horovod has not been initialized; use hvd.init()."


class Session:
    """Horovod in this process: off, or on with an engine."""

    def __init__(self) -> None:
        self._place: Seat | None = None
        self._engine: CollectiveEngine | None = None
        self._comm: Communicator | None = None

    def set_place(self, place: Seat) -> None:
        """Who this process is; said once, before the script runs."""
        self._place = place

    @property
    def place(self) -> Seat | None:
        """Who this process is; None where drop-in has not started it."""
        return self._place

    @property
    def is_on(self) -> bool:
        """Between ``start`` and ``stop``."""
        return self._engine is not None

    def check_on(self) -> None:
        """Passes while Horovod is on.

        Raises:
            ValueError: it is not, in Horovod's words.
        """
        if self._engine is None:
            raise ValueError(_NOT_ON)

    @property
    def engine(self) -> CollectiveEngine:
        """The engine of this process.

        Raises:
            ValueError: Horovod is not on, in Horovod's words.
        """
        if self._engine is None:
            raise ValueError(_NOT_ON)
        return self._engine

    @property
    def comm(self) -> Communicator:
        """The processes of the job.

        Raises:
            ValueError: Horovod is not on.
        """
        if self._comm is None:
            raise ValueError(_NOT_ON)
        return self._comm

    def start(self) -> None:
        """Meets the other processes; without effect while Horovod is on.

        Raises:
            ConfigError: this is not a process that drop-in has started.
            ResourceError: the others did not come, or the backend is not available.
        """
        if self._engine is not None:
            return
        if self._place is None:
            raise ConfigError(
                "hvd.init() in a process that drop-in has not started",
                fix="call it in the script itself, not in a process that the script starts",
            )
        self._comm = create(self._place.world, self._place.comm, device_of(self._place))
        host: Communicator | None = self._comm
        if not moves_host_memory(self._comm.process_group):
            host = split_host(self._comm, range(self._comm.size))
        assert host is not None
        self._engine = CollectiveEngine(self._comm, host, stalls=self._place.stalls)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Leaves the other processes; without effect while Horovod is off."""
        atexit.unregister(self.stop)
        engine, self._engine = self._engine, None
        comm, self._comm = self._comm, None
        if engine is not None and comm is not None:
            engine.close()
            comm.close()

    def abandon(self) -> None:
        """``stop`` for a process that has failed: it waits for nobody."""
        atexit.unregister(self.stop)
        engine, self._engine = self._engine, None
        comm, self._comm = self._comm, None
        if engine is not None and comm is not None:
            engine.close()
            comm.abort()

    def add_members(self, ranks: Sequence[int]) -> int:
        """The number of a new process set."""
        return self.engine.add_members(ranks)


def device_of(place: Seat) -> torch.device:
    """That of this process's accelerator where every process of this host has its own."""
    backend, local = place.comm.backend, place.world.local_size
    own = torch.cuda.is_available() and torch.cuda.device_count() >= local
    return torch.device("cuda" if backend == "nccl" or (backend == "auto" and own) else "cpu")


session = Session()
"""The only one of this process."""
