"""The launcher of one command: N processes on this machine, or none where none are needed."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torsh_trainer.environments.reading import LOOPBACK, first_rank
from torsh_trainer.environments.world import ALONE, Rendezvous, World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers import hardware, job
from torsh_trainer.launchers.base import LaunchContext, Launcher, print_explanation
from torsh_trainer.launchers.local_transport import LocalTransport, ProcessSlot
from torsh_trainer.launchers.transport import TransportFactory

_BACKLOG = 1024


@dataclass(frozen=True)
class Local(Launcher):
    """Starts ``num_processes`` on this machine; a single one runs right here.

    Under torchrun, srun or mpirun the processes exist already, and the entry runs in each of them.
    Where the environment tells only a node's place (see ``World.told``), the node's share of the
    processes is started.

    ``num_processes`` auto is one per visible accelerator, else 1, or what the environment says.
    ``threads_per_process`` auto divides this machine's cores among several processes, unless
    OMP_NUM_THREADS is set, and leaves a single one to torch. ``port`` None takes a free one.
    ``address`` None is the loopback, or what the environment says.
    ``startup_timeout_s`` bounds the time until every process has started; ``grace_s`` the time
    that processes have to save and finish after SIGINT or SIGTERM.
    """

    name = "local"

    num_processes: int | Literal["auto"] = "auto"
    threads_per_process: int | Literal["auto"] = "auto"
    address: str | None = None
    port: int | None = None
    startup_timeout_s: float = 120.0
    grace_s: float = 25.0
    explain: bool = False

    def __post_init__(self) -> None:
        _check_count("num_processes", self.num_processes)
        _check_count("threads_per_process", self.threads_per_process)
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigError(
                f"launcher.port={self.port} is not a port",
                fix="choose one in 1024..65535, or null for a free one",
            )
        if self.startup_timeout_s <= 0 or self.grace_s < 0:
            raise ConfigError(
                f"launcher.startup_timeout_s={self.startup_timeout_s} and "
                f"launcher.grace_s={self.grace_s} must be positive times",
                fix="the defaults are 120 and 25 seconds",
            )

    def launch(self, entry: Callable[..., Any], *args: Any, context: LaunchContext) -> Any:
        """See ``Launcher.launch``; a single process's own errors come through as they are.

        Raises:
            ConfigError: ``num_processes`` contradicts the world that was found.
            ResourceError: the port is in use.
        """
        worlds = self._worlds(context)
        if self.explain:
            print_explanation(context, self._plan_words(worlds, context))
        if len(worlds) == 1:
            with _torch_threads(self.threads_per_process):
                return entry(worlds[0], *args)
        seats = self.seats(len(worlds), context)
        with seats as held, _listening(worlds) as (placed, listener):
            workers = job.Workers(
                worlds=placed,
                env=context.env,
                threads=self._threads(len(worlds), context),
                log_dir=context.log_dir,
            )
            transport = self.transport(listener=listener, seats=held)
            limits = job.JobTimeouts(startup_s=self.startup_timeout_s, grace_s=self.grace_s)
            return job.run(entry, args, workers=workers, transport=transport, limits=limits)

    def seats(
        self, count: int, context: LaunchContext
    ) -> contextlib.AbstractContextManager[Sequence[ProcessSlot]]:
        """Places that another program holds for the processes; here there are none to take."""
        return contextlib.nullcontext(())

    def transport(
        self, *, listener: socket.socket | None, seats: Sequence[ProcessSlot]
    ) -> TransportFactory:
        """What starts the processes; ``listener`` is where they meet, if rank 0 is among them."""
        return partial(LocalTransport, listener=listener, seats=seats)

    def size(self, context: LaunchContext) -> int:
        return self._worlds(context)[0].size

    # -- which processes -------------------------------------------------------------------------

    def _worlds(self, context: LaunchContext) -> tuple[World, ...]:
        """The places of the processes to start here; a single one is this process's own."""
        found = context.found or ALONE
        if found.size == 1 and not found.elastic:
            count = self.num_processes
            if count == "auto":
                count = hardware.accelerators(context.env) or 1
            meeting = Rendezvous(self.address or "127.0.0.1", self.port or 0)
            return (found,) if count == 1 else _places(count, count, 0, meeting, self.name)
        found = self._set_meeting(found)
        if found.told == "process":
            if self.num_processes not in ("auto", 1, found.local_size):
                raise ConfigError(
                    f"launcher.num_processes={self.num_processes}, but {found.source} already "
                    f"started {found.size} processes, {found.local_size} of them here",
                    fix="leave launcher.num_processes=auto, or start this command only once",
                )
            return (found,)
        return self._fill(found)

    def _fill(self, found: World) -> tuple[World, ...]:
        """The processes of this node, of which the environment told only the first, or the node."""
        wanted = self.num_processes
        if found.told == "node" and found.local_size > 1:
            count, first = found.local_size, found.rank
            if wanted not in ("auto", count):
                raise ConfigError(
                    f"launcher.num_processes={wanted}, but {found.source} tells {count} processes "
                    "per node",
                    fix="leave launcher.num_processes=auto, or make LOCAL_WORLD_SIZE equal to it",
                )
        else:
            count = 1 if wanted == "auto" else wanted
            name = "RANK" if found.told == "rank" else "NODE_RANK"
            if found.told == "node" or count == 1:
                first = first_rank(found.rank, per_node=count, size=found.size, name=name)
            else:
                first = found.rank
        if count == 1:
            return (replace(found, told="process"),)
        if first % count or found.size % count:
            raise ConfigError(
                f"launcher.num_processes={count} cannot start at rank {first} of {found.size}: "
                "each node's first rank, and the size, must be multiples of it",
                fix="set LOCAL_RANK too if every process is started by hand; else give each node "
                "its first rank as RANK",
            )
        assert found.rendezvous is not None, "a world of several processes has a meeting"
        return _places(count, found.size, first, found.rendezvous, found.source)

    def _set_meeting(self, found: World) -> World:
        """``found``, meeting where the knobs say."""
        meeting = found.rendezvous
        if meeting is None or (self.address is None and self.port is None):
            return found
        if meeting.hosted:
            raise ConfigError(
                f"launcher.address and launcher.port cannot be honoured: {found.source} already "
                f"serves {meeting.address}:{meeting.port}",
                fix=f"leave them null, and choose the port where {found.source} is started",
            )
        address, port = self.address or meeting.address, self.port or meeting.port
        return replace(found, rendezvous=Rendezvous(address, port))

    def _threads(self, count: int, context: LaunchContext) -> int | None:
        if self.threads_per_process != "auto":
            return self.threads_per_process
        if context.env.get("OMP_NUM_THREADS"):
            return None
        return max(1, hardware.cores() // count)

    def _plan_words(self, worlds: tuple[World, ...], context: LaunchContext) -> str:
        if len(worlds) == 1:
            return "runs in this process"
        threads = self._threads(len(worlds), context)
        number = context.env.get("OMP_NUM_THREADS") if threads is None else threads
        return (
            f"starts {len(worlds)} processes here, rank {worlds[0].rank} to {worlds[-1].rank} "
            f"of {worlds[0].size}, with {number} threads each"
        )


def _check_count(name: str, value: object) -> None:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return
    raise ConfigError(
        f"launcher.{name}={value} is no number of {name.partition('_')[2] or name}",
        fix="set it to 1 or more, or to auto",
    )


def _places(
    count: int, size: int, first: int, meeting: Rendezvous, source: str
) -> tuple[World, ...]:
    return tuple(
        World(
            rank=first + i,
            size=size,
            local_rank=i,
            local_size=count,
            node_rank=first // count,
            nodes=size // count,
            rendezvous=meeting,
            source=source,
        )
        for i in range(count)
    )


@contextlib.contextmanager
def _listening(
    worlds: tuple[World, ...],
) -> Iterator[tuple[tuple[World, ...], socket.socket | None]]:
    """The worlds with their final meeting place, and rank 0's socket, bound before it starts.

    Raises:
        ResourceError: the port is in use, or the address is not this machine's.
    """
    meeting = worlds[0].rendezvous
    assert meeting is not None, "processes to start have a meeting"
    if worlds[0].rank != 0 or meeting.hosted:
        yield worlds, None
        return
    with _bind_socket(meeting) as listener:
        meeting = replace(meeting, port=listener.getsockname()[1])
        main = replace(worlds[0], rendezvous=replace(meeting, listen_fd=listener.fileno()))
        yield (main, *(replace(world, rendezvous=meeting) for world in worlds[1:])), listener


def _bind_socket(meeting: Rendezvous) -> socket.socket:
    """A listening socket: on the loopback alone when all meet there, else on every interface."""
    try:
        if meeting.address in LOOPBACK:
            v6 = meeting.address == "::1"
            host, family = ("::1", socket.AF_INET6) if v6 else ("127.0.0.1", socket.AF_INET)
            return socket.create_server((host, meeting.port), family=family, backlog=_BACKLOG)
        dual = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", meeting.port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=dual,
        )
    except OSError as error:
        words = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error}"
        raise ResourceError(
            f"port {meeting.port} on {meeting.address} {words}",
            fix="leave launcher.port=null for a free one, or choose another (MASTER_PORT where the "
            "environment sets it)",
            port=meeting.port,
        ) from error


@contextlib.contextmanager
def _torch_threads(threads: int | Literal["auto"]) -> Iterator[None]:
    """A number of threads for an entry in this process; auto leaves torch's own."""
    if threads == "auto":
        yield
        return
    import torch  # a launcher that starts processes does without it

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
