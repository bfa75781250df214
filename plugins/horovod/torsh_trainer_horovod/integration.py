"""Horovod in a script: what a configuration asks for, and this process's place in the job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torsh_trainer import environments
from torsh_trainer.comm import create
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.compression import TopK
from torsh_trainer.comm.compression.base import Compression, NoCompression
from torsh_trainer.environments.world import ALONE, World
from torsh_trainer.errors import ConfigError
from torsh_trainer_horovod import runtime
from torsh_trainer_horovod.strategy import Horovod


def rank() -> int:
    """This process's rank, by what started it."""
    return _world().rank


def size() -> int:
    """The number of processes of the job."""
    return _world().size


def local_rank() -> int:
    """This process's number on its node."""
    return _world().local_rank


def local_size() -> int:
    """The number of processes on this node."""
    return _world().local_size


@dataclass(frozen=True)
class HorovodElasticConfig:
    """Between how many processes a job of Horovod's elastic mode may have.

    It starts with ``initial_workers`` (None: ``min_workers``), and ``timeout_s`` is how long it
    waits for ``min_workers`` after a change.

    Raises:
        ConfigError: the numbers contradict one another.
    """

    min_workers: int
    max_workers: int
    initial_workers: int | None = None
    timeout_s: int = 300

    def __post_init__(self) -> None:
        for name, value, least in (
            ("min_workers", self.min_workers, 1),
            ("max_workers", self.max_workers, self.min_workers),
            ("initial_workers", self.first_workers, self.min_workers),
            ("timeout_s", self.timeout_s, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}={value} is below {least}", fix=f"give {least} or more")
        if self.first_workers > self.max_workers:
            raise ConfigError(
                f"initial_workers={self.initial_workers} is above max_workers={self.max_workers}",
                fix=f"give {self.max_workers} or less",
            )

    @property
    def first_workers(self) -> int:
        """With how many processes the job starts."""
        return self.min_workers if self.initial_workers is None else self.initial_workers

    def horovodrun(
        self, *command: str, discovery: str, network_interface: str | None = None
    ) -> tuple[str, ...]:
        """The words that start ``command`` so; ``discovery`` is the script that prints the hosts.

        On a single host ``horovodrun`` has to be told the interface (``lo``): it looks for one that
        two hosts have, and waits for the second.
        """
        words = ["horovodrun", "-np", str(self.first_workers)]
        words += ["--min-np", str(self.min_workers), "--max-np", str(self.max_workers)]
        words += ["--elastic-timeout", str(self.timeout_s), "--host-discovery-script", discovery]
        if network_interface is not None:
            words += ["--network-interface", network_interface]
        return (*words, *command)


@dataclass(frozen=True)
class HorovodConfig:
    """The knobs of the strategy, and the trainer's compression over it.

    ``elastic`` says that processes may come and go; None that they stay.
    """

    strategy: Horovod
    compression: Compression = NoCompression()
    elastic: HorovodElasticConfig | None = None


class HorovodIntegration:
    """Horovod running in this process, by a configuration.

    ``Trainer(task=..., **integration.options)`` trains with it.
    """

    def __init__(self, config: HorovodConfig) -> None:
        self.config = config
        self._comm: Communicator | None = None
        self._running: runtime.Running | None = None

    @staticmethod
    def default_config() -> HorovodConfig:
        """Gradients travel in 64 MiB, and are collected for a millisecond."""
        return HorovodConfig(Horovod(fusion_threshold_mb=64.0, cycle_time_ms=1.0))

    @staticmethod
    def config_with_topk_compression(k: float) -> HorovodConfig:
        """The share ``k`` of each gradient travels, its largest elements; the rest follows later.

        Raises:
            ConfigError: ``k`` is not in (0, 1].
        """
        return HorovodConfig(HorovodIntegration.default_config().strategy, TopK(k))

    @staticmethod
    def config_with_elastic(min_workers: int, max_workers: int) -> HorovodConfig:
        """Processes may come and go between the two numbers, beginning with ``min_workers``.

        ``config.elastic.horovodrun(...)`` is the command that starts a script so.

        Raises:
            ConfigError: ``min_workers`` is below 1, or ``max_workers`` below it.
        """
        elastic = HorovodElasticConfig(min_workers, max_workers)
        return HorovodConfig(HorovodIntegration.default_config().strategy, elastic=elastic)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of Trainer that the configuration stands for.

        Raises:
            ConfigError: processes are to come and go, and nothing has started this one so.
        """
        elastic = self.config.elastic
        if elastic is not None and not _world().elastic:
            command = " ".join(elastic.horovodrun("python", "SCRIPT", discovery="HOSTS"))
            raise ConfigError(
                "the configuration is an elastic one, and Horovod's elastic mode has not started "
                "this process",
                fix=f"start it with {command}, where HOSTS is a script that prints a line "
                "HOST:PROCESSES for each host",
            )
        return {"strategy": self.config.strategy, "compression": self.config.compression}

    def initialize(self, rank: int, size: int, local_rank: int, local_size: int) -> None:
        """Joins the other processes and starts Horovod among them. Collective.

        Raises:
            ConfigError: it was called before, or the numbers are not this process's.
            ResourceError: a process did not come, or Horovod does not start.
        """
        if self._comm is not None:
            raise ConfigError(
                "this HorovodIntegration is initialized already", fix="call initialize once"
            )
        world = _world()
        if self.config.elastic is not None or world.elastic:
            raise ConfigError(
                "where processes come and go, nobody can join them once for all",
                fix="leave initialize out: Trainer(task=..., **integration.options) joins them "
                "anew after every change, in a script that horovodrun has started with --min-np",
            )
        given = (rank, size, local_rank, local_size)
        found = (world.rank, world.size, world.local_rank, world.local_size)
        if given != found:
            raise ConfigError(
                f"(rank, size, local_rank, local_size) were given as {given}, and this process is "
                f"{found}",
                fix="pass rank(), size(), local_rank() and local_size() of this module",
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        comm = create(world, CommOptions(), device)
        self._running = runtime.start(comm, self.config.strategy.variables)
        self._comm = comm

    def rank(self) -> int:
        """This process's rank in Horovod; as the three below, after ``initialize``."""
        return int(self._hvd.rank())

    def size(self) -> int:
        """The number of processes."""
        return int(self._hvd.size())

    def local_rank(self) -> int:
        """This process's number on its node."""
        return int(self._hvd.local_rank())

    def local_size(self) -> int:
        """The number of processes on this node."""
        return int(self._hvd.local_size())

    def allreduce(self, tensor: Tensor, *, name: str) -> Tensor:
        """The mean of everybody's ``tensor``; ranks call it under one ``name``."""
        mean: Tensor = self._hvd.allreduce(tensor, name=name)
        return mean

    def shutdown(self) -> None:
        """Ends Horovod in this process, once no engine trains with it either."""
        if self._running is not None:
            self._running.close()
            self._running = None

    @property
    def _hvd(self) -> Any:
        if self._running is None:
            raise ConfigError(
                "this HorovodIntegration is not initialized",
                fix="call initialize(rank(), size(), local_rank(), local_size()) first",
            )
        return self._running.hvd


def _world() -> World:
    return environments.detect(os.environ) or ALONE
