"""Horovod's runtime in this process: it runs while somebody uses it, whatever started the process.

Horovod reads its place, its rendezvous and its settings from the environment when it starts, and
nowhere else. Under ``horovodrun`` all of it is there. Elsewhere rank 0 serves Horovod's own
rendezvous and tells the others where, through the communicator that they have already. What is
written to the environment is taken back: a process that this one starts is none of Horovod's.

In Horovod's elastic mode (``start_elastic``) it runs from the first moment to the last: Horovod's
own loop ends it and starts it anew, when processes have come or gone.

While it runs, a thread of Horovod's wakes up every ``HOROVOD_CYCLE_TIME`` (1 ms), for about a tenth
of a core. So it ends with its last user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil

from torsh_trainer.comm.base import Communicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
GIVEN = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
"""What horovodrun sets, with everything else that a process needs."""
OVER = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
"""What says whether Horovod talks gloo or MPI."""
TUNED = {"HOROVOD_FUSION_THRESHOLD": str(128 * 2**20), "HOROVOD_CYCLE_TIME": "1"}
"""What Horovod's autotune may change, with Horovod's defaults.

A process that has set one of them keeps that value for good, though Horovod is started anew without
it; so the default is then set. One that has set one of them dies (a segmentation fault in 0.28.1)
when Horovod is started anew and both are set by then.
"""


ELASTIC_TIMEOUT_S = "60"
"""How long Horovod waits for a process that comes to have loaded torch (30 s by default)."""


@dataclass
class _Process:
    """What of Horovod runs in this process, and what it cannot forget."""

    users: int = 0
    """How many have started it and not closed it."""

    variables: Mapping[str, str] | None = None
    """The settings with which ``start`` has started it; None where it does not run by ``start``."""

    server: Any = None
    """Rank 0's rendezvous, where it is ours."""

    given: bool = False
    """Whether horovodrun's rendezvous is used up: it serves one start."""

    tuned: set[str] = field(default_factory=set)
    """Those of ``TUNED`` that were ever set."""

    elastic: bool = False
    """Whether Horovod's own loop starts it anew, and nobody else may."""


_process = _Process()


class Running:
    """Horovod, which runs at least until ``close``; ``with`` gives the module and closes.

    One that is dropped unclosed closes when it is collected.
    """

    def __init__(self, hvd: Any) -> None:
        self.hvd = hvd
        _process.users += 1
        self._end = weakref.finalize(self, _leave, hvd)
        self._end.atexit = False  # Horovod ends itself there

    def close(self) -> None:
        """Ends Horovod where nobody else uses it.

        Not where a script or ``horovodrun`` has started it, and not where it could not be started
        anew. Ranks do so in the same order, none waits for the others.
        """
        self._end()

    def __enter__(self) -> Any:
        return self.hvd

    def __exit__(self, *error: object) -> None:
        self.close()


def start(comm: Communicator, variables: Mapping[str, str]) -> Running:
    """``horovod.torch``, running among the members of ``comm`` with these settings.

    Collective. Where it runs with other settings, it is started anew; where a script has started
    it, it is taken as it is.

    Raises:
        ConfigError: Horovod runs among other processes than ``comm``, or in some of them.
        ResourceError: it does not start, or cannot be started anew.
    """
    # Imported here: it loads Horovod's libraries.
    import horovod.torch as hvd

    running = Running(hvd)  # from here on nobody else's end is Horovod's
    variables = _telling(variables)
    foreign = hvd.is_initialized() and _process.variables is None
    same = hvd.is_initialized() and variables == _process.variables
    everywhere: list[tuple[bool, bool]] = comm.all_gather_object((foreign, same))
    if any(foreign for foreign, _ in everywhere):
        _check_foreign([foreign for foreign, _ in everywhere], variables)
    elif not all(same for _, same in everywhere):
        _start(hvd, comm, variables)
    _check_place(hvd, comm)
    return running


def start_elastic(variables: Mapping[str, str]) -> Any:
    """``horovod.torch``, running among the processes that its elastic driver has chosen.

    The settings stay in the environment, for Horovod is started anew with them whenever processes
    come or go.

    Raises:
        ConfigError: it could not be started anew with these settings.
        ResourceError: it does not start.
    """
    # Imported here, as in ``start``.
    import horovod.torch as hvd

    variables = _telling(variables)
    tuned = {name for name in TUNED if name in variables or name in os.environ}
    if len(tuned) == len(TUNED):
        raise ConfigError(
            "Horovod's elastic mode starts it anew, which it does not survive once "
            "strategy.fusion_threshold_mb and strategy.cycle_time_ms are both set",
            fix="leave one of them (or horovodrun's option of that name) out",
        )
    if os.environ.get("HOROVOD_AUTOTUNE", "0") != "0":  # strategy.autotune is refused before
        raise ConfigError(
            "Horovod's elastic mode with HOROVOD_AUTOTUNE (horovodrun --autotune): each process "
            "counts the samples by itself, and those who come would not agree with the others",
            fix="leave it out, and set what it found in a run of its own",
        )
    os.environ.update(variables)
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", ELASTIC_TIMEOUT_S)
    try:
        hvd.init()
    except (RuntimeError, ValueError) as error:
        raise ResourceError(
            f"Horovod does not start: {error}", fix="HOROVOD_LOG_LEVEL=debug says more"
        ) from error
    _process.variables, _process.tuned = variables, tuned
    _process.elastic = _process.given = True
    return hvd


def _start(hvd: Any, comm: Communicator, variables: Mapping[str, str]) -> None:
    if _process.elastic:
        raise ConfigError(
            "Horovod's elastic mode has started Horovod in this process with other settings",
            fix="train with one strategy=horovod in it",
        )
    tuned = {name for name in TUNED if name in variables or name in os.environ} | _process.tuned
    _check_anew(tuned)
    _stop(hvd)
    given = GIVEN in os.environ and not _process.given
    if comm.backend == "mpi" and hvd.mpi_built():
        given, server, place = False, None, dict.fromkeys(OVER, "mpi")
    else:
        server, place = (None, {}) if given else _meet(comm)
    kept = {name: os.environ.get(name, TUNED[name]) for name in _process.tuned}
    with _environment({**place, **kept, **variables}):
        _process.tuned = tuned
        _process.given = given or _process.given
        _process.server = server
        try:
            hvd.init()
        except (RuntimeError, ValueError) as error:
            raise ResourceError(
                f"Horovod does not start on rank {comm.world.rank}: {error}",
                fix="HOROVOD_LOG_LEVEL=debug says more",
            ) from error
    _process.variables = dict(variables)
    comm.barrier()  # who joins still asks rank 0's rendezvous, which may end from here on


def _telling(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` without those of ``TUNED`` that say what Horovod does without them."""
    if "HOROVOD_AUTOTUNE" in {**os.environ, **variables}:
        return dict(variables)  # which varies those that are not set
    return {
        name: value
        for name, value in variables.items()
        if name not in TUNED or name in os.environ or float(value) != float(TUNED[name])
    }


def _leave(hvd: Any) -> None:
    """One user less; with the last of them Horovod ends, see ``Running.close``."""
    _process.users -= 1
    ours = _process.variables is not None and not _process.given
    if _process.users == 0 and ours and len(_process.tuned) < len(TUNED):
        _stop(hvd)


def _stop(hvd: Any) -> None:
    """Ends Horovod in this process, and with it in the others, and rank 0's rendezvous."""
    hvd.shutdown()
    _process.variables = None
    if _process.server is not None:
        # Beside, for it waits half a second for its thread.
        threading.Thread(target=_end, args=(_process.server,), daemon=True).start()
        _process.server = None


def _end(server: Any) -> None:
    server.shutdown()
    server.server_close()


def _check_foreign(foreign: list[bool], variables: Mapping[str, str]) -> None:
    """Raises ConfigError where a script has started Horovod in some processes alone."""
    if not all(foreign):
        raise ConfigError(
            f"a script has started Horovod on rank {foreign.index(True)} and not on rank "
            f"{foreign.index(False)}",
            fix="call hvd.init() in all processes of this run, or leave it to strategy=horovod",
        )
    if variables:
        log.warning("Horovod runs already: %s come too late", ", ".join(variables))


def _check_anew(tuned: set[str]) -> None:
    """Raises ResourceError where Horovod would end the process, see ``TUNED``."""
    if _process.tuned and len(tuned) == len(TUNED):
        raise ResourceError(
            "Horovod has run in this process with other settings, and cannot be started anew once "
            "strategy.fusion_threshold_mb and strategy.cycle_time_ms were both set",
            fix="train with these settings in a process of its own",
        )


def _check_place(hvd: Any, comm: Communicator) -> None:
    mine, theirs = (comm.world.rank, comm.world.size), (hvd.rank(), hvd.size())
    if mine != theirs:
        raise ConfigError(
            f"this process is rank {mine[0]} of {mine[1]}, and for Horovod {theirs[0]} of "
            f"{theirs[1]}",
            fix="start Horovod in the processes of this run, or leave it to strategy=horovod",
        )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within, ``variables`` stand in the environment. Against the rule: Horovod looks there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- where the processes meet ----------------------------------------------------------------------


class _Place(NamedTuple):
    """What the ranks tell one another."""

    node_rank: int
    local_rank: int
    local_size: int


def _meet(comm: Communicator) -> tuple[Any, dict[str, str]]:
    """Rank 0's rendezvous (None elsewhere), and what Horovod has to find in the environment."""
    world = comm.world
    mine = _Place(world.node_rank, world.local_rank, world.local_size)
    places: list[_Place] = comm.all_gather_object(mine)
    address = _address(world)
    server = None
    if world.is_rank_zero:
        server = _serve(address, places)
    host, port = comm.broadcast_object((address, server.server_address[1] if server else 0))
    # Those that have my number on their nodes: Horovod reduces among them when it is hierarchical.
    nodes = sorted(place.node_rank for place in places if place.local_rank == mine.local_rank)
    return server, {
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(nodes.index(world.node_rank)),
        "HOROVOD_CROSS_SIZE": str(len(nodes)),
        "HOROVOD_HOSTNAME": _hostname(world.node_rank),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": _interface(address),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _serve(address: str, places: list[_Place]) -> Any:
    """Horovod's rendezvous server, listening at ``address`` alone."""
    # Imported here, as in ``start``.
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    slots = []
    for rank, place in enumerate(places):
        same = sorted(other.node_rank for other in places if other.local_rank == place.local_rank)
        slots.append(
            SlotInfo(
                _hostname(place.node_rank),
                rank,
                place.local_rank,
                same.index(place.node_rank),
                len(places),
                place.local_size,
                len(same),
            )
        )
    server.init(slots)
    threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True).start()
    return server


def _hostname(node_rank: int) -> str:
    """A name for the rendezvous alone: two nodes may call themselves the same."""
    return f"node-{node_rank}"


def _address(world: World) -> str:
    """This process's address towards the others.

    Raises:
        ResourceError: it has none but the loopback, and there are other nodes.
    """
    if world.nodes == 1 or world.rendezvous is None:
        return LOOPBACK
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named:
        return next((ip for name, ip in _interfaces() if name == named), LOOPBACK)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((world.rendezvous.address, 1))  # sends nothing: it only chooses a way
        address = str(probe.getsockname()[0])
    if address.startswith("127."):
        raise ResourceError(
            f"{world.rendezvous.address} is the loopback on this host, which other nodes cannot "
            "reach",
            fix="name the interface between the nodes: comm.network_interface=eth0",
        )
    return address


def address_of(interface: str) -> str:
    """This process's address on ``interface``; the host's name where it has none there."""
    named = (address for name, address in _interfaces() if name == interface)
    return next(named, socket.gethostname())


def _interface(address: str) -> str:
    """The network interface that has ``address``."""
    return next((name for name, ip in _interfaces() if ip == address), "lo")


def _interfaces() -> list[tuple[str, str]]:
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
