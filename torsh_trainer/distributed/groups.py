"""Process groups by hand: making, asking and leaving them, as scripts do without a trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from torsh_trainer import environments
from torsh_trainer.comm import devices, start
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.failures import (
    BackendError,
    CollectiveArgumentError,
    RendezvousError,
)
from torsh_trainer.distributed import checking
from torsh_trainer.distributed.process_group import BackendType, Group, ProcessGroup, hold, resolve
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ResourceError, nearest
from torsh_trainer.utils import registry

log = logging.getLogger(__name__)

DEFAULT_PORT = 29500
_INIT = "call init_process_group first, or start training with python -m torsh_trainer"
_OPTIONS = CommOptions()


class InitMethod(str):
    """Where processes meet: ``ENV`` (by the environment), ``tcp(...)`` or ``file(...)``."""

    ENV: InitMethod
    Env: InitMethod

    @classmethod
    def tcp(cls, address: str, port: int = DEFAULT_PORT) -> InitMethod:
        """At a port of the host that runs rank 0."""
        return cls(f"tcp://{address}:{port}")

    @classmethod
    def file(cls, path: str | os.PathLike[str]) -> InitMethod:
        """In a file that every process can write, and that does not exist yet."""
        return cls(f"file://{os.fspath(path)}")


InitMethod.ENV = InitMethod.Env = InitMethod("env://")


class Rank(int):
    """The number of a process; a plain integer does as well."""


class WorldSize(int):
    """How many processes there are; a plain integer does as well."""


# -- making a group --------------------------------------------------------------------------------


def init_process_group(
    backend: BackendType | str = "auto",
    *place: Any,
    init_method: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    timeout: timedelta | float | None = None,
    startup_timeout: timedelta | float | None = None,
    on_missing: Literal["error", "fallback"] = "error",
    network_interface: str | None = None,
    device_id: torch.device | int | None = None,
    store: Any = None,
    check: bool | None = None,
) -> ProcessGroup:
    """Joins the processes of a job, and returns their group once all have arrived.

    Three forms::

        init_process_group(BackendType.GLOO, 0, 4, "localhost", 29500)  # rank, size, where
        init_process_group(BackendType.NCCL, InitMethod.ENV)  # by the environment
        init_process_group(backend="gloo", world_size=4, rank=rank, timeout=600)

    Times are timedeltas or seconds. ``timeout`` bounds every operation and, unless
    ``startup_timeout`` is given, the wait for all to arrive. ``on_missing="fallback"`` takes gloo
    on every process when one of them lacks ``backend``. Rank and size are ignored for MPI, whose
    mpirun has given them. ``check`` has ranks compare what they call before every collective,
    or before none (default: the first calls; all with TORCH_DISTRIBUTED_DEBUG=DETAIL).

    Raises:
        CollectiveArgumentError: the arguments contradict one another, or do not suffice.
        BackendError: the backend is not available.
        RendezvousError: a process did not arrive in time, or the meeting place is taken.
    """
    if dist.is_initialized():
        raise CollectiveArgumentError(
            "this process is in a process group already", fix="call destroy_process_group() first"
        )
    name = _name(backend)
    asked = _Place.of(place, init_method, world_size, rank, master_addr, master_port)
    options = CommOptions(
        backend=name,
        timeout_s=_seconds(timeout, _OPTIONS.timeout_s),
        startup_timeout_s=_seconds(startup_timeout or timeout, _OPTIONS.startup_timeout_s),
        network_interface=network_interface,
        on_missing=on_missing,
    )
    world = asked.world(name, os.environ, has_store=store is not None)
    device = _device(name, world, device_id)
    store = asked.store(world) if store is None else store
    comm = _join_world(world, options, device, store)
    whole = ProcessGroup(comm.process_group, timeout_s=options.timeout_s, device=comm.device)
    hold(whole)
    checking.set_check(check)
    return whole


def _join_world(
    world: World, options: CommOptions, device: torch.device, store: Any
) -> Communicator:
    try:
        store = None if store is None else PrefixStore("torsh", store)
        return start.create(world, options, device, store=store)
    except ResourceError as error:
        _reraise(error)


def _reraise(error: ResourceError) -> NoReturn:
    """The same words, in the kinds that handlers of torch's errors catch."""
    missing_someone = error.facts.keys() & {"ranks", "address", "port"}
    kind = RendezvousError if missing_someone else BackendError
    raise kind(error.sentence, fix=error.fix, **error.facts) from error


@dataclass(frozen=True)
class _Place:
    """What a call says of this process's place; None where it says nothing."""

    method: str | None
    size: int | None
    rank: int | None
    address: str | None
    port: int | None

    @classmethod
    def of(
        cls,
        place: Sequence[Any],
        method: str | None,
        size: int | None,
        rank: int | None,
        address: str | None,
        port: int | None,
    ) -> _Place:
        """The positional forms and the keywords, as one."""
        by_number = bool(place) and isinstance(place[0], int)
        names = (
            ("rank", "world_size", "master_addr", "master_port")
            if by_number
            else ("init_method", "world_size", "rank")
        )
        if len(place) > len(names):
            raise CollectiveArgumentError(
                f"init_process_group takes at most {len(names)} arguments after the backend here, "
                f"and got {len(place)}",
                fix=f"they are {', '.join(names)}",
            )
        given: dict[str, Any] = {
            "init_method": method,
            "world_size": size,
            "rank": rank,
            "master_addr": address,
            "master_port": port,
        }
        for name, value in zip(names, place, strict=False):
            if value is not None and given[name] is not None:
                raise CollectiveArgumentError(
                    f"init_process_group got {name} twice", fix="by place or by name, not both"
                )
            given[name] = given[name] if value is None else value
        return cls(
            given["init_method"],
            _number("world_size", given["world_size"], at_least=1),
            _number("rank", given["rank"], at_least=0),
            given["master_addr"],
            _number("master_port", given["master_port"], at_least=0),
        )

    def world(self, backend: str, env: Mapping[str, str], *, has_store: bool) -> World:
        """This process's place, with where to meet."""
        if backend == "mpi":
            if self.rank is not None or self.size is not None:
                log.info("mpi: rank, size and place come from mpirun; the arguments are ignored")
            return _find_world(env) or World(source="mpi")
        if (self.rank is None) != (self.size is None) and self.method is None:
            raise CollectiveArgumentError(
                "init_process_group got one of rank and world_size", fix="give both, or neither"
            )
        if self.rank is None or self.size is None:
            if (self.method or "env").partition(":")[0] != "env":
                raise CollectiveArgumentError(
                    f"init_method={self.method} needs rank and world_size", fix="pass both"
                )
            found = _find_world(env)
            if found is None:
                raise CollectiveArgumentError(
                    "nothing in the environment says which process of how many this is",
                    fix="start with torchrun, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
                    "or pass rank and world_size",
                )
            return found
        return self._by_hand(env, meets=not has_store)

    def _by_hand(self, env: Mapping[str, str], *, meets: bool) -> World:
        assert self.rank is not None
        assert self.size is not None
        if self.rank >= self.size:
            raise CollectiveArgumentError(
                f"rank {self.rank} of {self.size} processes", fix="ranks go from 0"
            )
        local_rank, local_size = self.rank, self.size
        if env.get("LOCAL_RANK", "").isdigit() and env.get("LOCAL_WORLD_SIZE", "").isdigit():
            local_rank, local_size = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
        return World(
            rank=self.rank,
            size=self.size,
            local_rank=local_rank,
            local_size=local_size,
            rendezvous=self._rendezvous(env) if meets and self.size > 1 else None,
            source="init_process_group",
        )

    def _rendezvous(self, env: Mapping[str, str]) -> Rendezvous | None:
        address, port = self.address, self.port
        method = self.method or "env://"
        if method.startswith("file://"):
            return None
        if method.startswith("tcp://"):
            host, _, number = method.removeprefix("tcp://").rpartition(":")
            address, port = host.strip("[]"), _number("port", number, at_least=1)
        elif method not in ("env://", "env"):
            raise CollectiveArgumentError(
                f"init_method={method!r} is unknown", fix="choose env://, tcp://HOST:PORT, file://"
            )
        address = address or env.get("MASTER_ADDR")
        if address is None:
            raise CollectiveArgumentError(
                "nothing says where the processes meet",
                fix="pass master_addr and master_port, or set MASTER_ADDR and MASTER_PORT",
            )
        if port is None:
            port = _number("MASTER_PORT", env.get("MASTER_PORT", DEFAULT_PORT), at_least=1)
        # The address may have been read from torchrun's variables by the script: it is the same
        # place, where the agent serves.
        named = (env.get("MASTER_ADDR"), env.get("MASTER_PORT")) == (address, str(port))
        if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not named:
            return Rendezvous(address, port or DEFAULT_PORT)
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "")
        attempts = int(attempt) if attempt.isdigit() else 0
        return Rendezvous(address, port or DEFAULT_PORT, hosted=True, attempt=attempts)

    def store(self, world: World) -> Any:
        """The store of ``file://``; None for every other method."""
        if self.method is None or not self.method.startswith("file://"):
            return None
        return FileStore(self.method.removeprefix("file://"), world.size)


def _find_world(env: Mapping[str, str]) -> World | None:
    found = environments.detect(env)
    if found is None:
        return None
    if found.told == "node":
        raise CollectiveArgumentError(
            f"{found.source} tells a node's place, not a process's",
            fix="set RANK or LOCAL_RANK in every process, or start them with torchrun",
        )
    return replace(found, told="process")


def _name(backend: BackendType | str) -> str:
    text = backend.value if isinstance(backend, BackendType) else str(backend).lower()
    torchs = [name for name in dist.Backend.backend_list if name != "undefined"]
    known = sorted({*(kind.value for kind in BackendType), *torchs, *registry.BACKENDS.names()})
    if text not in known:
        raise CollectiveArgumentError(f"backend {backend!r} is unknown", fix=nearest(text, known))
    return text


def _number(name: str, value: Any, *, at_least: int) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value == -1):
        return None  # -1 is torch's word for "not given"
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = at_least - 1
    if isinstance(value, bool | float) or number < at_least:
        raise CollectiveArgumentError(
            f"{name}={value!r} is not a whole number from {at_least} up", fix="give one"
        )
    return number


def _seconds(value: timedelta | float | None, default: float) -> float:
    if value is None:
        return default
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def _device(backend: str, world: World, device_id: torch.device | int | None) -> torch.device:
    if device_id is not None:
        index = device_id if isinstance(device_id, int) else device_id.index
        kind = "cuda" if isinstance(device_id, int) else device_id.type
        return torch.device(kind, index) if index is not None else torch.device(kind)
    if backend in ("nccl", "auto") and torch.cuda.is_available():
        return torch.device("cuda", devices.choose_index(world))
    return torch.device("cpu")


# -- asking and leaving ----------------------------------------------------------------------------


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: BackendType | str | None = None,
) -> ProcessGroup:
    """A group of some processes; every process of the job calls it, in the same order.

    On a process that is not one of ``ranks`` the group ``is_member`` false, and collectives over it
    do nothing but warn, as torch's do.

    Raises:
        CollectiveArgumentError: a rank does not exist.
    """
    whole = resolve()
    members = list(range(whole.world_size())) if ranks is None else sorted(set(ranks))
    for rank in members:
        if not 0 <= rank < whole.world_size():
            raise CollectiveArgumentError(
                f"rank {rank} is not one of this job's {whole.world_size()} processes",
                fix=f"ranks go from 0 to {whole.world_size() - 1}",
            )
    seconds = _seconds(timeout, whole.timeout_s)
    name = None if backend is None else _name(backend)
    made = dist.new_group(members, timeout=timedelta(seconds=seconds), backend=name)
    return ProcessGroup(made, timeout_s=seconds, device=whole.device if name is None else None)


def is_initialized() -> bool:
    """Whether this process is in a group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Group = None) -> int:
    """This process's number; 0 before there is a group, -1 outside of ``group``."""
    return resolve(group).rank() if is_initialized() else 0


def get_world_size(group: Group = None) -> int:
    """How many processes there are; 1 before there is a group, -1 outside of ``group``."""
    return resolve(group).world_size() if is_initialized() else 1


def get_backend(group: Group = None) -> str:
    """The name of the backend in use.

    Raises:
        BackendNotInitialized: there is no group.
    """
    return resolve(group).backend


def is_available() -> bool:
    """Whether this torch was built with torch.distributed."""
    return dist.is_available()


def is_nccl_available() -> bool:
    """Whether NCCL can be used here: torch has it, and there is a CUDA device."""
    return not start.lacking("nccl", torch.device("cuda")) and torch.cuda.is_available()


def is_gloo_available() -> bool:
    """Whether gloo can be used here."""
    return not start.lacking("gloo", torch.device("cpu"))


def is_mpi_available() -> bool:
    """Whether there is an MPI backend: in this torch, or in an installed plugin."""
    return dist.is_mpi_available() or "mpi" in registry.BACKENDS
