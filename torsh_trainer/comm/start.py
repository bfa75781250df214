"""Meeting: how the processes of a job find one another and agree on a backend."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from torsh_trainer.comm import devices
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.ending import destroy
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.comm.torch import TorchCommunicator, moves_host_memory, world_of
from torsh_trainer.comm.watchdog import ranks_words
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.errors import ConfigError, ResourceError, TorshError, nearest
from torsh_trainer.utils import registry

log = logging.getLogger(__name__)

# A store outlives the communicators that met in it: rank 0 may meet the others again (a second
# fit in the same processes), and its listening socket can be taken over only once.
_stores: dict[tuple[str, int], Store] = {}
_meetings: dict[tuple[str, int], Iterator[int]] = {}
_UNKNOWN = "torch.distributed knows no backend"


def create(
    world: World,
    options: CommOptions,
    device: torch.device,
    *,
    process_group: bool = True,
    store: Store | None = None,
) -> Communicator:
    """The communicator of ``world``, when all of its processes have arrived.

    A process group that exists already is used as it is and left alone by ``close``. One process
    gets a group of one, or none at all with ``process_group=False``. They meet where ``world``
    says, or in a ``store`` to which each has a connection already.

    Raises:
        ConfigError: the backend or interface has an unknown name, or nothing says where to meet.
        ResourceError: the backend is not available, the port is taken, or a rank did not arrive.
    """
    if dist.is_initialized():
        return _existing(world, options, device)
    if world.size == 1 and not process_group:
        return LocalCommunicator(_bind_device(device, world), world=world)
    device = _bind_device(device, world)
    _use_interface(options.network_interface)
    if store is None:
        store = _store(world, options)
    backend = _agree(store, world, options, device)
    _connect(store, world, options, device, backend)
    return _communicator(world, device, options, owned=True)


def share_from_rank_zero(world: World, said: Any, options: CommOptions = CommOptions()) -> Any:
    """What rank 0 has ``said``, plain values, on every process; before they meet.

    Raises:
        ResourceError: rank 0 did not come.
    """
    store = _store(world, options)
    if world.is_rank_zero:
        store.set("answer", json.dumps(said, default=str))
        return said
    return _answer(store, world, options)


def _existing(world: World, options: CommOptions, device: torch.device) -> Communicator:
    """The process group that the user made, as a communicator."""
    group, size = dist.group.WORLD, dist.get_world_size()
    backend = str(dist.get_backend()).lower()
    if options.backend not in ("auto", backend):
        raise ConfigError(
            f"comm.backend={options.backend}, but this process is already in a {backend} group",
            fix="set comm.backend=auto, or destroy that group first",
        )
    if (world.rank, world.size) != (dist.get_rank(), size):
        if world.size != 1:
            raise ConfigError(
                f"this process is rank {world.rank} of {world.size} by its environment and "
                f"{dist.get_rank()} of {size} in the process group that exists already",
                fix="destroy that group first, or start the processes in one way",
            )
        # Processes that a user's own script has started: only the group knows of the others.
        world = world_of(group, node=socket.gethostname(), source="process group")
        if device.type == "cuda":
            device = torch.device("cuda", devices.choose_index(world))
    device = _bind_device(device, world)
    return _communicator(world, device, options, owned=False)


def _communicator(
    world: World, device: torch.device, options: CommOptions, *, owned: bool
) -> TorchCommunicator:
    """This job's, and beside a backend that moves no memory of the host (NCCL) gloo for numbers.

    That is a group of its own, and not ``cpu:gloo,cuda:nccl`` for all: device meshes split NCCL's.
    """
    whole, limit, values = dist.group.WORLD, timedelta(seconds=options.timeout_s), None
    if world.size > 1 and not moves_host_memory(whole) and dist.is_gloo_available():
        with _connecting(world, "gloo", owned=owned):
            values = dist.new_group(backend="gloo", timeout=limit)
    return TorchCommunicator(
        world, device, whole, timeout_s=options.timeout_s, owned=owned, values_group=values
    )


# -- device, interface, names ----------------------------------------------------------------------


def _bind_device(device: torch.device, world: World) -> torch.device:
    """``device`` with its number, made the current one: NCCL places its buffers there."""
    if device.type != "cuda":
        return device
    index = devices.choose_index(world) if device.index is None else device.index
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _use_interface(names: str | None) -> None:
    if names is None:
        return
    known = [name for _, name in socket.if_nameindex()]
    for name in names.split(","):
        if name not in known:
            raise ConfigError(
                f"comm.network_interface={names}: this host has no {name!r}",
                fix=f"it has {', '.join(known)}",
            )
    # Written to the environment, against the rule: NCCL and gloo read these two there and
    # nowhere else. "=" makes NCCL match the whole name instead of a beginning.
    os.environ["GLOO_SOCKET_IFNAME"] = names
    os.environ["NCCL_SOCKET_IFNAME"] = f"={names}"


def _known_backends() -> list[str]:
    """Backends that torch.distributed has a name for in this process."""
    return [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]


def lacking(backend: str, device: torch.device) -> str:
    """Why this process cannot use ``backend``; empty when it can."""
    if backend not in _known_backends():
        return f"{_UNKNOWN} {backend!r}"
    if backend == "nccl" and device.type != "cuda":
        return f"nccl moves CUDA tensors, and this process computes on {device.type}"
    if not dist.is_backend_available(backend):
        plugin = registry.DISTRIBUTIONS.get(("comm", backend))
        brings = f", which the plugin {plugin} brings" if plugin else ""
        return f"this torch ({torch.__version__}) was built without {backend}{brings}"
    return ""


def _unloadable(backend: str, world: World, store: Store) -> str:
    """Why the plugin that brings ``backend`` cannot serve here; empty when it can, or has none."""
    if backend not in registry.BACKENDS:
        return ""
    try:
        registry.BACKENDS.load(backend)(world, store)
    except TorshError as error:
        return str(error)
    return ""


# -- the store -------------------------------------------------------------------------------------


def _store(world: World, options: CommOptions) -> Store:
    """Where the processes leave notes for each other; a fresh part of it for every meeting."""
    if world.size == 1:
        return PrefixStore("torsh", HashStore())
    if world.rendezvous is None:
        raise ConfigError(
            f"{world.size} processes, and nothing says where they meet",
            fix="set MASTER_ADDR and MASTER_PORT in every one, or start them with launcher=local",
        )
    place = (world.rendezvous.address, world.rendezvous.port)
    if place in _stores and not _answers(_stores[place]):
        forget(*place)  # another may be served there since
    if place not in _stores:
        _stores[place] = _tcp_store(world, world.rendezvous, options)
        _meetings[place] = itertools.count()
    meeting = next(_meetings[place])
    secret = f"{world.rendezvous.token}/" if world.rendezvous.token else ""
    return PrefixStore(f"torsh/{secret}{world.rendezvous.attempt}/{meeting}", _stores[place])


def _answers(store: Store) -> bool:
    """Whether whoever serves it is still there."""
    try:
        store.check(["torsh"])
    except RuntimeError:
        return False
    return True


def forget(address: str, port: int) -> None:
    """Lets go of the store at a place where this process meets no more of those it met there."""
    _stores.pop((address, port), None)
    _meetings.pop((address, port), None)


def _tcp_store(world: World, rendezvous: Rendezvous, options: CommOptions) -> Store:
    serves = world.is_rank_zero and not rendezvous.hosted
    place = f"{rendezvous.address}:{rendezvous.port}"
    try:
        return TCPStore(
            rendezvous.address,
            rendezvous.port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=options.startup_timeout_s),
            master_listen_fd=rendezvous.listen_fd if serves else None,
        )
    except RuntimeError as error:
        words = str(error)
        if "EADDRINUSE" in words or "already in use" in words:
            raise ResourceError(
                f"port {rendezvous.port} is in use, and rank 0 wanted to serve the job there",
                fix="give MASTER_PORT another port, or end the program that has it",
                port=rendezvous.port,
            ) from error
        who = "torchrun's agent" if rendezvous.hosted else "rank 0"
        raise ResourceError(
            f"rank {world.rank} could not reach {who} at {place} within "
            f"{options.startup_timeout_s:g} s",
            fix="see whether it runs and whether the address is right; "
            "comm.startup_timeout_s waits longer",
            address=place,
        ) from error


# -- agreement -------------------------------------------------------------------------------------


def _agree(store: Store, world: World, options: CommOptions, device: torch.device) -> str:
    """The backend for all: every rank says what it has, rank 0 answers, and all of them obey.

    What a plugin brings is loaded in a second round, when all have come and say that they have it:
    MPI's library waits for every process as soon as it is initialised.
    """
    names = _candidates(options.backend)
    lacks = {name: "" if name in registry.BACKENDS else lacking(name, device) for name in names}
    note = {
        "wanted": options.backend,
        "device": device.type,
        "gpu": devices.identify(device),
        "plugins": [name for name in names if name in registry.BACKENDS],
        "lacks": lacks,
    }
    answer = _decide_backend(PrefixStore("known", store), note, world, options)
    if answer["loads"]:
        name = answer["backend"]
        lacks[name] = _unloadable(name, world, store) or lacking(name, device)
        answer = _decide_backend(PrefixStore("loaded", store), note, world, options)
    return str(answer["backend"])


def _decide_backend(
    store: Store, note: Mapping[str, Any], world: World, options: CommOptions
) -> dict[str, Any]:
    """Rank 0's answer to what all ranks have noted: the backend, and whether a plugin brings it."""
    store.set(f"rank {world.rank}", json.dumps(note))
    if world.is_rank_zero:
        try:
            notes = _roll_call(store, world, options)
            gpus = {rank: note["gpu"] for rank, note in notes.items()}
            devices.check_apart(gpus, world, shares=options.backend == "gloo")
            backend = _choose(notes, options)
            loads = any(backend in each["plugins"] for each in notes.values())
            answer: dict[str, Any] = {"backend": backend, "loads": loads}
        except TorshError as error:
            answer = {"kind": type(error).__name__, "sentence": error.sentence, "fix": error.fix}
            answer["facts"] = error.facts
        store.set("answer", json.dumps(answer))
    else:
        answer = _answer(store, world, options)
    if "backend" not in answer:
        kind = ConfigError if answer["kind"] == "ConfigError" else ResourceError
        raise kind(answer["sentence"], fix=answer["fix"], **answer["facts"])
    return answer


def _candidates(wanted: str) -> list[str]:
    return ["nccl", "gloo"] if wanted == "auto" else list(dict.fromkeys([wanted, "gloo"]))


def _roll_call(store: Store, world: World, options: CommOptions) -> dict[int, Mapping[str, Any]]:
    """What every rank says of itself.

    Raises:
        ResourceError: some did not arrive in time; they are named.
    """
    keys = [f"rank {rank}" for rank in range(world.size)]
    try:
        store.wait(keys, timedelta(seconds=options.startup_timeout_s))
    except RuntimeError as error:
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise ResourceError(
            f"{ranks_words(late)} of {world.size} did not arrive within "
            f"{options.startup_timeout_s:g} s",
            fix="see the logs of those ranks; comm.startup_timeout_s waits longer",
            ranks=late,
        ) from error
    return {rank: json.loads(store.get(key)) for rank, key in enumerate(keys)}


def _answer(store: Store, world: World, options: CommOptions) -> dict[str, Any]:
    # A little longer than rank 0 itself waits, so that its answer still comes through.
    patience_s = options.startup_timeout_s + 10
    try:
        store.wait(["answer"], timedelta(seconds=patience_s))
        return json.loads(store.get("answer"))
    except RuntimeError as error:
        raise ResourceError(
            f"rank {world.rank} waited {patience_s:g} s for rank 0, which ended or did not arrive",
            fix="see the log of rank 0; comm.startup_timeout_s waits longer",
            ranks=[0],
        ) from error


def _choose(notes: Mapping[int, Mapping[str, Any]], options: CommOptions) -> str:
    """The backend that every rank can use.

    Raises:
        ConfigError: ranks were given different backends, or one that nobody knows.
        ResourceError: the backend asked for is missing somewhere, and on_missing is error.
    """
    wanted = {note["wanted"] for note in notes.values()}
    if len(wanted) > 1:
        raise ConfigError(
            f"the processes ask for different backends: {', '.join(sorted(wanted))}",
            fix="give every process the same configuration",
        )
    name = options.backend
    if name == "auto":
        on_gpus = all(note["device"] == "cuda" for note in notes.values())
        name = "nccl" if on_gpus else "gloo"
    lacking = {rank: note["lacks"][name] for rank, note in notes.items() if note["lacks"][name]}
    if not lacking:
        return name
    if len(lacking) == len(notes) and next(iter(lacking.values())).startswith(_UNKNOWN):
        raise ConfigError(
            f"comm.backend={name} is unknown to torch.distributed",
            fix=nearest(name, ["auto", *_known_backends()]),
        )
    reason = f"{ranks_words(list(lacking))} cannot use {name}: {next(iter(lacking.values()))}"
    without_gloo = any(note["lacks"]["gloo"] for note in notes.values())
    if without_gloo or (options.backend != "auto" and options.on_missing == "error"):
        everywhere = all(name in note["plugins"] for note in notes.values())
        raise ResourceError(reason, fix=_way_out(name, installed=everywhere))
    log.warning("%s; all %d processes use gloo instead", reason, len(notes))
    return "gloo"


def _way_out(name: str, *, installed: bool) -> str:
    fallback = "set comm.on_missing=fallback to take gloo"
    plugin = registry.DISTRIBUTIONS.get(("comm", name))
    if plugin and not installed:
        return f"pip install {plugin}, or {fallback}"
    is_strategy = name in registry.STRATEGIES.builtin
    other = f", and another strategy than strategy={name}" if is_strategy else ""
    return f"{fallback}, or choose comm=auto{other}"


def _connect(
    store: Store, world: World, options: CommOptions, device: torch.device, backend: str
) -> None:
    """Makes the process group, and proves that every process is in it."""
    with _connecting(world, backend):
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=options.timeout_s),
            device_id=device if backend == "nccl" else None,
        )
        if backend == "gloo":
            # Its error names the rank that is missing, where that of other collectives does not.
            wait = timedelta(seconds=min(options.startup_timeout_s, options.timeout_s))
            dist.monitored_barrier(timeout=wait, wait_all_ranks=True)


@contextlib.contextmanager
def _connecting(world: World, backend: str, *, owned: bool = True) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if owned and dist.is_initialized():
            destroy()
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ResourceError(
            f"all {world.size} processes arrived, but {backend} could not connect rank "
            f"{world.rank}: {first[0]}",
            fix="a process ended meanwhile (see its log), or hosts do not reach each other: "
            "name an interface with comm.network_interface",
        ) from error
