"""Mistakes in Compose files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torsh_trainer.doctor.script.base import PieceRule, ScriptMistake, ScriptPiece, node_at
from torsh_trainer.translate.nodes import Node

_LAUNCHERS = re.compile(r"torchrun|torch\.distributed|accelerate|deepspeed|mpirun|torsh_trainer")
_RANKS = ("RANK", "NODE_RANK")


@dataclass(frozen=True)
class _Service:
    name: str
    line: int
    node: Node
    env: Mapping[str, tuple[str, int]]

    def value(self, name: str) -> str:
        return self.env.get(name, ("", 0))[0]

    def line_of(self, name: str) -> int:
        return self.env.get(name, ("", self.line))[1]


def find_fixed_places(piece: ScriptPiece) -> dict[str, int]:
    """Services that have a fixed rank, and the line of it."""
    return {
        service.name: service.line_of(name)
        for service in _services(piece)
        for name in _RANKS
        if service.value(name).isdigit()
    }


def find_missing_ranks(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """WORLD_SIZE against the processes that the services start."""
    ranked = [service for service in _services(piece) if service.value("WORLD_SIZE").isdigit()]
    if not ranked or any(_starts_several(service) for service in ranked):
        return
    size = int(ranked[0].value("WORLD_SIZE"))
    started = sum(_copies(service.node)[0] for service in ranked)
    if started != size:
        fixed = [s for s in ranked if s.value("LOCAL_RANK").isdigit()]
        note = ", each with LOCAL_RANK fixed" if len(fixed) == len(ranked) else ""
        gpus = max(_count_gpus(service.node) for service in ranked)
        each = f" (torchrun --nproc-per-node {gpus})" if gpus > 1 else ""
        yield piece.mistake(
            "world_size_is_not_started",
            ranked[0].line_of("WORLD_SIZE"),
            why=f"{len(ranked)} services start {started} process(es){note}, and WORLD_SIZE={size}: "
            "those that start wait for the rest until their time-out",
            fix=f"WORLD_SIZE={started}, or have each service start its processes{each}, and leave "
            "LOCAL_RANK out",
        )


def find_doubled_ranks(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """Two containers with one rank."""
    places: dict[tuple[str, str], list[_Service]] = defaultdict(list)
    for service in _services(piece):
        copies, line = _copies(service.node)
        for name in _RANKS:
            value = service.value(name)
            if not value.isdigit():
                continue
            places[name, value].append(service)
            if copies > 1:
                yield piece.mistake(
                    "replicas_have_one_rank",
                    line,
                    why=f"{copies} copies of {service.name} all have {name}={value}",
                    fix="a service for each rank; replicas cannot be told apart",
                )
    for (name, value), services in places.items():
        if len(services) > 1 and len({s.value("LOCAL_RANK") for s in services}) == 1:
            yield piece.mistake(
                "rank_stands_twice",
                services[1].line_of(name),
                why=f"{services[0].name} has {name}={value} as well: two take one place",
                fix=f"number the services from 0: {name}={len(services) - 1}",
            )


def find_small_shared_memory(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """A service with GPUs and 64 MB of /dev/shm."""
    for service in _services(piece):
        keys = set(service.node.value)
        if _count_gpus(service.node) and not keys & {"shm_size", "ipc"}:
            yield piece.mistake(
                "shared_memory_of_64_mb",
                service.line,
                why="/dev/shm of a container has 64 MB: NCCL and loader workers end in Bus error",
                fix=f"{service.name}: shm_size: 8gb (or ipc: host)",
            )


def find_unknown_master(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """MASTER_ADDR that names no service, or the container itself."""
    services = _services(piece)
    names = {service.name for service in services}
    several = sum("MASTER_ADDR" in service.env for service in services) > 1
    for service in services:
        address = service.value("MASTER_ADDR")
        aliases = {str(n.plain()) for n in (node_at(service.node, "hostname"),) if n is not None}
        names |= aliases
        if (
            address
            and several
            and (
                address in ("localhost", "127.0.0.1")
                or (address not in names and not re.search(r"[.$:]", address))
            )
        ):
            yield piece.mistake(
                "master_is_no_service",
                service.line_of("MASTER_ADDR"),
                why="each container is a host of its own: this name is none of the services'",
                fix=f"MASTER_ADDR={services[0].name}",
            )


def _services(piece: ScriptPiece) -> list[_Service]:
    root = node_at(piece.root, "services") if piece.root is not None else None
    if root is None or not root.is_mapping:
        return []
    return [
        _Service(name, entry.place.line, entry.node, _environment(entry.node))
        for name, entry in root.value.items()
        if entry.node.is_mapping
    ]


def _environment(service: Node) -> dict[str, tuple[str, int]]:
    node = node_at(service, "environment")
    if node is None:
        return {}
    if node.is_mapping:
        return {
            name: (str(entry.node.plain()), entry.place.line) for name, entry in node.value.items()
        }
    found = {}
    for item in node.value if node.is_list else ():
        name, _, value = str(item.plain()).partition("=")
        found[name] = (value, item.place.line)
    return found


def _starts_several(service: _Service) -> bool:
    words = [node_at(service.node, name) for name in ("command", "entrypoint")]
    return any(node is not None and _LAUNCHERS.search(str(node.plain())) for node in words)


def _copies(service: Node) -> tuple[int, int]:
    """(copies, the line that says so)."""
    for path in (("scale",), ("deploy", "replicas")):
        node = node_at(service, *path)
        if node is not None and isinstance(node.value, int):
            return node.value, node.place.line
    return 1, service.place.line


def _count_gpus(service: Node) -> int:
    node = node_at(service, "deploy", "resources", "reservations", "devices")
    count = 0
    for device in node.value if node is not None and node.is_list else ():
        said = node_at(device, "count")
        listed = node_at(device, "device_ids")
        if said is not None:
            count += said.value if isinstance(said.value, int) else 1
        elif listed is not None and listed.is_list:
            count += len(listed.value)
        else:
            count += "gpu" in str(device.plain())
    runtime = node_at(service, "runtime")
    return count or int(
        (runtime is not None and runtime.value == "nvidia") or node_at(service, "gpus") is not None
    )


RULES: tuple[PieceRule, ...] = (
    find_missing_ranks,
    find_doubled_ranks,
    find_small_shared_memory,
    find_unknown_master,
)
