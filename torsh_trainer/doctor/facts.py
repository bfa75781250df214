"""What of a host is held against the other hosts of a job."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torsh_trainer.doctor.checks.network import is_inward
from torsh_trainer.doctor.machine import Machine, find_addresses
from torsh_trainer.hosts.interfaces import list_interfaces
from torsh_trainer.hosts.versions import collect_versions, hash_code, hash_package

_VARIABLES = ("RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
        "versions": collect_versions(),
        "code": {
            "torsh_trainer": hash_package(),
            str(folder): hash_code(folder),
        },
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "speed": {
            one.name: machine.read_number(f"/sys/class/net/{one.name}/speed")
            for one in interfaces
            if machine.glob(f"sys/class/net/{one.name}/device")  # a virtual one makes its speed up
        },
    }
