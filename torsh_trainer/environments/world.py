"""Frozen facts about the processes of one job: who I am, how many we are, where we meet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torsh_trainer.errors import ConfigError


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a job meet.

    ``address``/``port`` name rank 0's TCP store. ``listen_fd`` is a listening socket already bound
    to that port, inherited by rank 0 alone: nobody can take the port between choosing and using
    it. ``hosted`` says that another process (torchrun's agent) already serves the store there, so
    that no rank may bind the port. ``attempt`` counts the restarts of the job over that store,
    which still holds what earlier attempts have written. ``token`` is a secret of the job, under
    which all of its notes in the store stand: who connects there without it neither reads nor
    writes one of them.
    """

    address: str
    port: int
    listen_fd: int | None = None
    hosted: bool = False
    attempt: int = 0
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class World:
    """One process's place among all processes of the job.

    ``rank`` in [0, size), ``local_rank`` in [0, local_size) counts the processes of this node,
    ``node_rank`` in [0, nodes). ``source`` names the environment that decided (``torchrun``,
    ``slurm``, ..., ``alone``) and ``reasons`` lists the variables that it read, one line each.

    ``told`` says how much of this was told: ``process`` everything; ``rank`` the rank, but not the
    place on the node (RANK without LOCAL_RANK), so that ``rank`` may also be the first of several
    processes that a launcher starts here; ``node`` only the node's number, so that ``local_size``
    processes are still to be started, of which ``rank`` is the first. Running processes have
    ``process``. ``elastic`` says that processes may come and go while the job runs.

    Raises:
        ConfigError: the numbers contradict one another.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    rendezvous: Rendezvous | None = None
    source: str = "alone"
    reasons: tuple[str, ...] = field(default=(), compare=False)
    told: Literal["process", "rank", "node"] = "process"
    elastic: bool = False

    def __post_init__(self) -> None:
        ranges = (
            ("rank", self.rank, self.size),
            ("local_rank", self.local_rank, self.local_size),
            ("node_rank", self.node_rank, self.nodes),
        )
        for name, value, bound in ranges:
            if not 0 <= value < bound:
                raise ConfigError(
                    f"{self.source}: {name} {value} is outside 0..{bound - 1}",
                    fix="launcher.explain=true prints the variables that decided",
                    name=name,
                    value=value,
                )

    @property
    def is_rank_zero(self) -> bool:
        """True on the one process that writes files and speaks to the user."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """True when there is somebody to communicate with."""
        return self.size > 1


ALONE = World()
