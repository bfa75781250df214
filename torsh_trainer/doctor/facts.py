"""What of a host is held against the other hosts of a job."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torsh_trainer
from torsh_trainer.doctor.checks.network import is_inward
from torsh_trainer.doctor.interfaces import list_interfaces
from torsh_trainer.doctor.machine import Machine, find_addresses

_VARIABLES = ("RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST_FILES = 5000


def collect_facts(machine: Machine, *, folder: Path, peers: Sequence[str]) -> dict[str, Any]:
    """Plain values: versions, code, names, addresses, links, and rank variables of a host.

    ``folder`` is where the user stands, whose Python files may be the job's; ``peers`` are names
    of hosts, which are looked up here.
    """
    interfaces = [one for one in list_interfaces() if one.is_up and not is_inward(one)]
    return {
        "host": socket.gethostname(),
        "addresses": sorted(one.address for one in interfaces if one.address),
        "mtu": {one.name: one.mtu for one in interfaces},
        "peers": {name: sorted(find_addresses(name)) for name in peers},
        "versions": {
            "Python": ".".join(map(str, sys.version_info[:3])),
            "torch": _version_of("torch"),
            "torsh-trainer": torsh_trainer.__version__,
            "numpy": _version_of("numpy"),
        },
        "code": {
            "torsh_trainer": hash_code(Path(torsh_trainer.__file__).parent),
            str(folder): hash_code(folder),
        },
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "speed": {
            one.name: machine.read_number(f"/sys/class/net/{one.name}/speed")
            for one in interfaces
            if machine.glob(f"sys/class/net/{one.name}/device")  # a virtual one makes its speed up
        },
    }


def hash_code(folder: Path) -> str:
    """A short hash of the Python files of a folder, by name and content; empty without any.

    Of a very large folder the first files alone.
    """
    if not folder.is_dir():
        return ""
    found, digest = 0, hashlib.sha256()
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(n for n in folders if n[0] != "." and n not in ("runs", "node_modules"))
        for name in sorted(names):
            if not name.endswith(".py") or found >= _MOST_FILES:
                continue
            path = Path(base, name)
            found += 1
            digest.update(str(path.relative_to(folder)).encode("utf-8", "replace"))
            try:
                digest.update(path.read_bytes())
            except OSError as error:
                digest.update(str(error.errno).encode())
    return digest.hexdigest()[:12] if found else ""


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
