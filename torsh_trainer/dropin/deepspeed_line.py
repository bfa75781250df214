"""A line of DeepSpeed's launcher as an order: every option does something, is told, or is refused.

The line is read, with its quotes and variables, by the reader of launch files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_trainer.dropin.order import Order
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.launch.deepspeed_flags import parse_resources
from torsh_trainer.translate.launch.flags import StatedFlag
from torsh_trainer.translate.launch.job import LaunchLine
from torsh_trainer.translate.launch.lines import read_line
from torsh_trainer.translate.shell.script import read_script

_NAME = "--command"
_IDLE = (
    "master_port",
    "master_addr",
    "no_ssh",
    "no_ssh_check",
    "force_multi",
    "bind_cores_to_rank",
    "log_level",
    "quiet",
    "q",
)
"""Options without an effect on what is computed."""
_HOSTS = ("localhost", "127.0.0.1")


def read_deepspeed_command(text: str, *, env: Mapping[str, str]) -> Order | None:
    """The order that a line of ``deepspeed`` is; None where another launcher stands in it.

    Raises:
        ConfigError: an option is wrong, or cannot be honoured here.
    """
    if "deepspeed" not in text:
        return None
    commands = read_script(text, name=_NAME, known=env).commands
    lines = [line for line in map(read_line, commands) if line is not None]
    if not lines or lines[0].launcher.launcher != "deepspeed":
        return None
    if len(lines) > 1 or len(lines[0].links) > 1:
        raise ConfigError(f"{_NAME} starts several things", fix="give one line of deepspeed")
    return _order(lines[0])


def _order(line: LaunchLine) -> Order:
    link = line.launcher
    for problem in link.problems:
        raise ConfigError(f"{_NAME}: {problem.what}", fix=problem.fix)
    if line.script is None or line.module or not line.script.text.endswith(".py"):
        raise ConfigError(
            f"{_NAME} starts no script that is a file", fix="it should end in train.py ARGUMENTS"
        )
    if line.command.variables:
        name = next(iter(line.command.variables))
        raise ConfigError(
            f"{_NAME} sets {name} for the launcher", fix=f"export {name} before drop-in"
        )
    for word in (line.script, *line.arguments):
        if word.holes:
            hole = word.holes[0]
            raise ConfigError(
                f"{_NAME}: only a shell knows {hole.text}", fix=f"write what {hole.text} is"
            )
    changes: dict[str, Any] = {"passes_local_rank": True}
    idle = [said.key for said in link.said if not _honour(said, changes)]
    remarks = (f"no effect here: {', '.join(idle)}",) if idle else ()
    arguments = tuple(word.text for word in line.arguments)
    return Order(Path(line.script.text), arguments).change(**changes, remarks=remarks)


def _honour(said: StatedFlag, changes: dict[str, Any]) -> bool:
    """Whether the option does something; what it does goes into ``changes``.

    Raises:
        ConfigError: it cannot be honoured.
    """
    if said.hole is not None:
        raise ConfigError(
            f"{_NAME}: only a shell knows {said.hole.text}", fix=f"write what {said.hole.text} is"
        )
    match said.name:
        case "num_gpus" | "num_accelerators":
            changes["processes"] = _count(said)
        case "num_nodes" if _count(said) == 1:
            pass
        case "include" | "i":
            changes["processes"] = _count_slots(said)
        case "hostfile" | "H" if said.text == "/dev/null":
            pass
        case "no_local_rank":
            changes["passes_local_rank"] = False
        case "enable_each_rank_log":
            changes["log_dir"] = Path(said.text)
        case name if name in _IDLE:
            return False
        case "num_nodes" | "hostfile" | "H" | "node_rank" | "launcher" | "launcher_args":
            raise ConfigError(
                f"{said.key} starts processes on other hosts, which drop-in does not",
                fix="start drop-in on every host by torchrun or srun, without -np",
            )
        case _:
            raise ConfigError(f"{said.key} is not there under drop-in", fix="take it out")
    return True


def _count(said: StatedFlag) -> int:
    if not said.text.isdigit() or int(said.text) < 1:
        raise ConfigError(
            f"{_NAME}: {said.key} {said.text} is no number of processes", fix="give 1 or more"
        )
    return int(said.text)


def _count_slots(said: StatedFlag) -> int:
    hosts = parse_resources(said.text)
    if len(hosts) != 1 or next(iter(hosts)) not in _HOSTS:
        raise ConfigError(
            f"{said.key} {said.text} names other hosts, on which drop-in starts nothing",
            fix="write localhost:0,1",
        )
    slots = next(iter(hosts.values()))
    if not slots:
        raise ConfigError(f"{said.key} {said.text} names no devices", fix="write localhost:0,1")
    if slots != [str(number) for number in range(len(slots))]:
        raise ConfigError(
            f"{said.key} {said.text} leaves devices out",
            fix=f"export CUDA_VISIBLE_DEVICES={','.join(slots)}, and write --num_gpus",
        )
    return len(slots)
