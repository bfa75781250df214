"""What an agent looks at on its host, asked by the launcher before anything is started."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torsh_trainer import environments
from torsh_trainer.hosts.interfaces import list_interfaces
from torsh_trainer.hosts.versions import collect_versions, hash_code, hash_package
from torsh_trainer.launchers.hardware import accelerators

_POLL_S = 0.05


def greet() -> dict[str, Any]:
    """Who this host is: its name, versions, accelerators, and the address that ssh came in by."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "host": socket.gethostname(),
        "versions": {**collect_versions(), "code of torsh_trainer": hash_package()},
        "arrived_at": connection[2] if len(connection) == 4 else "",
        "addresses": [
            one.address
            for one in list_interfaces()
            if one.is_up and one.address and not one.is_loopback and not one.is_virtual
        ],
    }


def tell_place() -> dict[str, Any]:
    """Which of the processes of a job this is, by the variables of whatever has started it."""
    # Where they meet is the launcher's to say, once it knows where rank 0 is.
    world = environments.detect({**os.environ, "MASTER_ADDR": "unknown", "MASTER_PORT": "1"})
    if world is None:
        return {"refused": "nothing has told this process its rank"}
    kept = ("rank", "size", "local_rank", "local_size", "node_rank", "nodes", "source")
    told = {name: getattr(world, name) for name in kept}
    return {"host": socket.gethostname(), **told}


def count_accelerators() -> dict[str, Any]:
    """How many accelerators this host has."""
    return {"count": accelerators(os.environ)}


def find_file(*, path: str, text: str, patience_s: float) -> dict[str, Any]:
    """Whether the file of another host is seen here, and this host may write beside it."""
    place, until_s = Path(path), time.monotonic() + patience_s
    while True:
        with contextlib.suppress(OSError):
            list(place.parent.iterdir())  # has a network file system ask its server anew
            if place.read_text("utf-8") == text:
                break
        if time.monotonic() > until_s:
            return {"seen": False, "folder": place.parent.is_dir()}
        time.sleep(_POLL_S)
    beside = place.with_name(f"{place.name}-{socket.gethostname()}")
    try:
        beside.write_text(text, "utf-8")
        beside.unlink()
    except OSError as error:
        return {"seen": True, "unwritten": error.strerror}
    return {"seen": True}


def hash_folders(*, folders: Sequence[str]) -> dict[str, Any]:
    """Folder -> hash of the Python files in it."""
    return {folder: hash_code(Path(folder)) for folder in folders}


def find_addresses(*, name: str) -> dict[str, Any]:
    """The addresses that a name has here."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return {"addresses": [], "why": str(error)}
    return {"addresses": list(dict.fromkeys(str(one[4][0]) for one in found))}


def try_connection(*, address: str, port: int, timeout_s: float) -> dict[str, Any]:
    """Connects to where the processes will meet: by which interface, or why it does not."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as end:
            return {"interface": _interface_of(str(end.getsockname()[0]))}
    except OSError as error:
        return {"refused": error.strerror or str(error) or type(error).__name__}


def name_interface(*, address: str) -> dict[str, Any]:
    """The interface that has an address."""
    return {"interface": _interface_of(address)}


def _interface_of(address: str) -> str:
    return next((one.name for one in list_interfaces() if one.address == address), "")


QUESTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "greet": greet,
    "tell_place": tell_place,
    "count_accelerators": count_accelerators,
    "find_file": find_file,
    "hash_folders": hash_folders,
    "find_addresses": find_addresses,
    "try_connection": try_connection,
    "name_interface": name_interface,
}
