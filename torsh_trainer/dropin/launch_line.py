"""A line of horovodrun as an order: every option does something, is told, or is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torsh_trainer.dropin.order import Order
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.horovod.job import LOCAL_HOSTS, Leaf
from torsh_trainer.translate.horovod.launch import read, variable_leaf
from torsh_trainer.translate.horovod.settings import by_variable
from torsh_trainer.translate.nodes import Place

_NAME = "--command"
_IDLE = {
    "command": "",
    "gloo": "",
    "check_build": "it starts nothing",
    "version": "it starts nothing",
    "verbose": "",
    "log_level": "",
    "log_with_timestamp": "",
    "prefix_timestamp": "",
    "disable_cache": "",
    "ssh_port": "",
    "ssh_identity_file": "",
}
"""Options without an effect on what is computed, that are passed over; some start no job at all."""

_STAYS = (
    "min_num_proc",
    "max_num_proc",
    "host_discovery_script",
    "slots",
    "elastic_timeout",
    "reset_limit",
    "cooldown_range",
)
"""Options for processes that come and go."""


def read_command(text: str, *, env: Mapping[str, str]) -> Order:
    """The order that a line of horovodrun is.

    Raises:
        ConfigError: it is no such line, an option is wrong, or cannot be honoured here.
    """
    launch = read(text, name=_NAME, known=env)
    for problem in launch.problems:
        if not problem.overlooked:
            raise ConfigError(f"{_NAME}: {problem.what}", fix=problem.fix)
    at = launch.script_at
    if at is None:
        raise ConfigError(
            f"{_NAME} starts no script: {' '.join(word.text for word in launch.command)!r}",
            fix="it should end in python train.py",
        )
    for word in launch.command[at:]:
        if word.open:
            raise ConfigError(
                f"{_NAME}: only a shell knows {word.text}", fix=f"write what ${word.open} is"
            )
    words = [word.text for word in launch.command[at:]]
    order = Order(Path(words[0]), tuple(words[1:]))
    changes, remarks = _honour(launch.leaves)
    return order.change(**changes, remarks=tuple(remarks))


def honour_variables(order: Order, env: Mapping[str, str]) -> Order:
    """``order`` with what Horovod's variables say that nobody has said otherwise.

    Raises:
        ConfigError: one has a value that it does not take.
    """
    leaves = []
    for name in sorted(env):
        setting = by_variable().get(name)
        if setting is None or setting.rule in _PLACES:
            continue
        leaf, problem = variable_leaf(name, env[name], Place(1, 1), "")
        if problem is not None:
            raise ConfigError(problem.what, fix=problem.fix)
        assert leaf is not None
        leaves.append(leaf)
    changes, remarks = _honour(leaves)
    unsaid = {
        name: value
        for name, value in changes.items()
        if getattr(order, name) == getattr(Order(order.script), name)
    }
    return order.change(**unsaid, remarks=(*order.remarks, *remarks))


_PLACES = ("env.place", "elastic.switch", "process-sets.permission")
"""Rules of variables that the modules of ours read, or that this job sets anew."""


def _honour(leaves: Iterable[Leaf]) -> tuple[dict[str, Any], list[str]]:
    changes: dict[str, Any] = {}
    idle, stays = [], []
    for leaf in leaves:
        match leaf.name:
            case "num_proc":
                changes["processes"] = leaf.value
            case "output_filename":
                changes["log_dir"] = Path(leaf.value)
            case "network_interfaces":
                changes["network_interface"] = leaf.value
            case "start_timeout":
                changes["startup_timeout_s"] = float(leaf.value)
            case "stall_warning_s":
                changes["stall_warning_s"] = float(leaf.value)
            case "stall_shutdown_s":
                changes["stall_shutdown_s"] = float(leaf.value)
            case "stall_check":
                changes["stall_warning_s"] = changes.get("stall_warning_s", 60.0) * leaf.value
            case "hosts":
                _check_hosts([host.name for host in leaf.value])
            case "hostfile" | "jsrun":
                raise ConfigError(
                    f"{leaf.key} starts processes on other hosts, which drop-in does not",
                    fix="start drop-in on every host by torchrun or srun, without -np",
                )
            case name if name in _STAYS:
                stays.append(leaf.key)
            case name if name not in _IDLE:
                idle.append(leaf.key)
            case name if _IDLE[name]:
                raise ConfigError(f"{leaf.key}: {_IDLE[name]}", fix="leave it out")
    remarks = []
    if stays:
        remarks.append(f"processes stay as they are: {', '.join(stays)} has no effect")
    if idle:
        remarks.append(f"without an effect here: {', '.join(idle)}")
    return changes, remarks


def _check_hosts(names: list[str]) -> None:
    here = (*LOCAL_HOSTS, socket.gethostname(), socket.getfqdn())
    others = [name for name in names if name not in here]
    if others:
        raise ConfigError(
            f"drop-in starts no processes on {', '.join(others)}",
            fix="start it on every host by torchrun or srun, without -np",
        )
