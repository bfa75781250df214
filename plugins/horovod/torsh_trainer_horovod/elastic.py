"""Horovod's elastic mode: processes come and go, and training goes on from what they keep.

``horovodrun`` with ``--min-np`` or ``--host-discovery-script`` starts processes, tells them when
the hosts have changed, and gives them new ranks. Horovod's own loop (``hvd.elastic.run``) ends and
starts Horovod between two attempts, and every attempt is an ordinary run: with a process group of
its own, a model, a loader. It goes on as from a checkpoint, except that the checkpoint never leaves
memory: every ``elastic_keep_every`` steps each process copies the whole state, and those that come
get rank 0's. A process that Horovod has no place for any more is ended by Horovod itself, which
aborts it when it is to start again.

When hosts were added or removed nothing is lost, for the state is kept before anybody leaves. When
a process was lost, the others go back to what was kept last, and do the steps since then again, on
the same samples.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from horovod.common.elastic import State
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.failures import CommunicationError, MismatchError
from torsh_trainer.comm.membership import Membership, Snapshot
from torsh_trainer.comm.start import create
from torsh_trainer.comm.symptoms import is_communication
from torsh_trainer.environments.horovod import Horovod as Environment
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ResourceError
from torsh_trainer_horovod import runtime
from torsh_trainer_horovod.connections import Connections, ConnectionWatch

if TYPE_CHECKING:
    from torsh_trainer_horovod.strategy import Horovod

log = logging.getLogger("torsh_trainer.horovod")

T = TypeVar("T")
CHANGED, LOST = "the hosts changed", "a process was lost"
IDLE = 3
"""So many attempts in a row without a step mean that something else is wrong."""

MEETING_S = 60.0
"""How long the processes of an attempt look for one another; Horovod has just brought them here."""

_PART_BYTES = 2**26
_ENDED = "Horovod has not been initialized"  # what its calls say once it has ended by itself


@dataclass
class _Carried:
    """What one attempt hands on to the next, and to processes that come."""

    run_dir: Path | None = None
    state: Mapping[str, Any] | None = None
    step: int = 0
    """After which ``state`` was kept."""

    reached: int = 0
    """The last step that was done."""

    size: int = 0
    cause: str = ""
    """Why the last attempt ended; empty while one goes on."""

    spent_s: float = 0.0
    resets: list[dict[str, Any]] = field(default_factory=list)


class ElasticMembership(Membership):
    """Processes that Horovod's elastic driver chooses, anew whenever hosts come, go or fail."""

    def __init__(self, knobs: Horovod, options: CommOptions) -> None:
        self._every = knobs.elastic_keep_every
        self._interface = os.environ.get("HOROVOD_GLOO_IFACE") or None
        self._patience_s = min(options.startup_timeout_s, MEETING_S)
        self._horovods, self._group = Connections(), Connections()
        with self._horovods.connect():
            self._hvd = runtime.start_elastic(knobs.variables)
        self._carried = _Carried()
        self._member = _Member(self)
        self._comm: Communicator | None = None
        self._timeline = os.environ.get("HOROVOD_TIMELINE") or None
        self._idle = 0
        self._began_s = time.monotonic()
        self._news = ""

    # -- between attempts ------------------------------------------------------------------------

    def run(self, attempt: Callable[[World], T], world: World) -> T:
        def make_attempt(member: _Member) -> T:
            return self._make_attempt(attempt)

        result: T = self._hvd.elastic.run(make_attempt)(self._member)
        return result

    def _make_attempt(self, attempt: Callable[[World], T]) -> T:
        world = self._world()
        self._note(world)
        self._began_s = time.monotonic()
        watch = ConnectionWatch(self._hvd, self._horovods, self._group)
        over: RuntimeError
        try:
            return attempt(world)
        except HostsUpdatedInterrupt:
            self._end_attempt(CHANGED)
            # Never without telling one another first, as Horovod would where it has heard of
            # removed hosts alone: others may have been added since, and those wait to be told.
            over = HostsUpdatedInterrupt(False)
        except Exception as error:
            if not self.survives(error):
                if isinstance(error, HorovodInternalError):  # which Horovod's loop would survive
                    raise self._idle_error(error) from error
                raise
            self._end_attempt(LOST)
            self._idle += 1
            over = HorovodInternalError(str(error))
        finally:
            watch.close()
        gc.collect()  # the model, which the error held until here, makes room for the next
        self._stop()
        self._put_trace_aside()
        raise over

    def _idle_error(self, error: Exception) -> CommunicationError:
        rank = self._hvd.rank() if self._hvd.is_initialized() else -1
        return CommunicationError(
            f"{IDLE} times in a row no step was done before processes lost one another: {error}",
            fix="look for the process that failed first, in its log",
            rank=rank,
        )

    def _end_attempt(self, cause: str) -> None:
        self._comm = None
        for connections in (self._horovods, self._group):
            if cause == LOST:
                connections.cut()  # who waits for this process notices; so does Horovod's thread
            connections.let_go()
        self._carried.cause = cause
        self._carried.spent_s += time.monotonic() - self._began_s

    def _note(self, world: World) -> None:
        carried, self._news = self._carried, ""
        if carried.cause:
            again = carried.reached - carried.step if carried.cause == LOST else 0
            carried.resets.append(
                {
                    "cause": carried.cause,
                    "from": carried.size,
                    "to": world.size,
                    "step": carried.step,
                    "steps_again": again,
                }
            )
            self._news = (
                f"{carried.cause} after step {carried.reached}: {carried.size} processes were at "
                f"work, and {world.size} go on from step {carried.step}"
                + (f", doing {again} steps again" if again else "")
            )
        carried.cause, carried.size = "", world.size

    def _stop(self) -> None:
        """Ends Horovod, as its loop is about to; that starts it anew and calls ``share``."""
        self._hvd.shutdown()
        self._horovods.begin()

    def _put_trace_aside(self) -> None:
        """Gives what Horovod has traced another name, for a trace begins anew when Horovod does.

        Nobody writes the next one before all that go on have come here.
        """
        if self._timeline is not None:
            path, number = Path(self._timeline), len(self._carried.resets) + 1
            with contextlib.suppress(OSError):  # another host has it, or another process was first
                path.rename(path.with_suffix(f".{number}{path.suffix}"))

    def share(self) -> None:
        """Everybody takes what rank 0 has carried here.

        Raises:
            HorovodInternalError: a process was lost meanwhile.
        """
        self._horovods.end()
        try:
            self._carried = _from_main(self._hvd, self._carried)
        except (HorovodInternalError, ValueError) as error:
            if isinstance(error, ValueError) and _ENDED not in str(error):
                raise
            self._horovods.cut()
            self._horovods.let_go()
            self._stop()
            raise HorovodInternalError(str(error)) from error

    # -- in an attempt ---------------------------------------------------------------------------

    def meet(
        self, world: World, options: CommOptions, device: torch.device, *, process_group: bool
    ) -> Communicator:
        interface = options.network_interface or self._interface
        options = replace(
            options,
            backend="gloo",
            network_interface=interface,
            startup_timeout_s=self._patience_s,
        )
        try:
            with self._group.connect():
                self._comm = create(world, options, device, store=self._store(world))
        except (ResourceError, RuntimeError) as error:
            raise HorovodInternalError(str(error)) from error
        return self._comm

    def _store(self, world: World) -> TCPStore | None:
        """Where the processes of this attempt meet, served by its rank 0; None for one process."""
        if world.size == 1:
            return None
        limit = timedelta(seconds=self._patience_s)
        place, store = None, None
        if world.is_rank_zero:
            address = runtime.address_of(self._interface or "")
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
            place = (address, store.port)
        address, port = _from_main(self._hvd, place)
        return store or TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=limit
        )

    def _world(self) -> World:
        """This process's place, by Horovod: what stands in the environment is of the first."""
        hvd = self._hvd
        numbers = {
            "RANK": hvd.rank(),
            "SIZE": hvd.size(),
            "LOCAL_RANK": hvd.local_rank(),
            "LOCAL_SIZE": hvd.local_size(),
            "CROSS_RANK": hvd.cross_rank(),
            "CROSS_SIZE": hvd.cross_size(),
        }
        told = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
        world = Environment().world({**os.environ, **told})
        assert world is not None, "both of what marks horovodrun are there"
        return world

    def broadcast_from_rank_zero(self, value: Any) -> Any:
        """Rank 0's ``value``, while an attempt goes on."""
        assert self._comm is not None, "asked after a step"
        return self._comm.broadcast_object(value)

    # -- what a run asks -------------------------------------------------------------------------

    @property
    def kept(self) -> Mapping[str, Any] | None:
        return self._carried.state

    @property
    def spent_s(self) -> float:
        return self._carried.spent_s

    @property
    def findings(self) -> Mapping[str, Any]:
        return {"resets": list(self._carried.resets)}

    def home(self, make: Callable[[], Path]) -> Path:
        if self._carried.run_dir is None:
            self._carried.run_dir = make()
        return self._carried.run_dir

    def begin(self) -> None:
        if self._news:
            log.warning("%s", self._news)

    def keep(self, step: int, snapshot: Snapshot) -> None:
        if self._carried.state is None or self._carried.step != step:
            self._carried.state, self._carried.step = snapshot(), step
        self._carried.reached = step

    def after_step(self, step: int, snapshot: Snapshot) -> None:
        self._carried.reached, self._idle = step, 0
        try:
            self._member.check_host_updates()
        except HostsUpdatedInterrupt:
            self.keep(step, snapshot)
            log.info("%s: asking Horovod's driver for a place after step %d", CHANGED, step)
            raise
        if step % self._every == 0:
            self.keep(step, snapshot)

    def survives(self, error: BaseException) -> bool:
        if isinstance(error, HostsUpdatedInterrupt):
            return True
        lost = isinstance(error, HorovodInternalError) or is_communication(error)
        lost = lost or (isinstance(error, ValueError) and _ENDED in str(error))
        return lost and not isinstance(error, MismatchError) and self._idle < IDLE


class _Member(State):
    """What Horovod's elastic loop calls a state: it hears of changes, and all else is above."""

    def __init__(self, membership: ElasticMembership) -> None:
        self._membership = membership
        super().__init__(bcast_object=membership.broadcast_from_rank_zero, get_rank=None)

    def sync(self) -> None:
        """Before an attempt."""
        self._membership.share()

    def save(self) -> None:
        """What ``commit`` would call: the loop keeps its state itself."""

    def restore(self) -> None:
        """An attempt begins from what was kept anyway."""


def _from_main(hvd: Any, value: Any) -> Any:
    """Rank 0's ``value`` on every rank; Horovod's own broadcast_object holds 2 GiB at most."""
    content = bytearray(pickle.dumps(value)) if hvd.rank() == 0 else bytearray()
    size = int(hvd.broadcast(torch.tensor([len(content)]), root_rank=0, name="elastic.size"))
    buffer = torch.frombuffer(content or bytearray(size), dtype=torch.uint8)
    for number, part in enumerate(buffer.split(_PART_BYTES)):
        hvd.broadcast_(part, root_rank=0, name=f"elastic.{number}")
    return value if hvd.rank() == 0 else pickle.loads(buffer.numpy().tobytes())
