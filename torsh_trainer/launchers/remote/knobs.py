"""Knobs that launchers over several hosts have in common, held against what they can be."""

from __future__ import annotations

import math
import re
from typing import Any

from torsh_trainer.errors import ConfigError

_OPTION = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9]*)=(?P<value>[^\x00-\x1f]+)", re.ASCII)
_OURS = {
    "batchmode": "a launcher has nobody to ask",
    "serveraliveinterval": "launcher.silence_s says it",
    "serveralivecountmax": "launcher.silence_s says it",
    "remotecommand": "the launcher's agent is what runs there",
    "requesttty": "what the agent tells must come as it is",
    "sessiontype": "the launcher's agent is what runs there",
    "stdinnull": "the input of ssh is the leash of the ranks",
    "forkafterauthentication": "the life of ssh is the life of the job",
    "controlpath": "the connection ends with its client",
    "controlmaster": "the connection ends with its client",
    "controlpersist": "the connection ends with its client",
    "port": "write launcher.ssh_port",
    "user": "write launcher.user",
    "proxyjump": "write launcher.jump_host",
}
_TRUSTS = {"stricthostkeychecking": ("no", "off"), "userknownhostsfile": ("/dev/null", "none")}


def check_ssh_option(text: str) -> None:
    """Refuses what is no option of ssh, or one that would take a promise back.

    Raises:
        ConfigError: says why, and what to write instead.
    """
    match = _OPTION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"launcher.ssh_options: {text!r} is not Name=value of ssh_config",
            fix="write for example [Compression=yes, 'ConnectTimeout=30']",
        )
    name, value = match["name"].lower(), match["value"].strip().lower()
    if name in _OURS:
        raise ConfigError(
            f"launcher.ssh_options: {match['name']} cannot be given here", fix=_OURS[name]
        )
    if value in _TRUSTS.get(name, ()):
        raise ConfigError(
            f"launcher.ssh_options: {text} would take any host for the one that is meant, and the "
            "run and its secrets are sent to it",
            fix="add the host's key: ssh-keyscan HOST >> ~/.ssh/known_hosts, and compare it",
        )


def check_job_knobs(knobs: Any, *, hosts_needed: bool = True) -> None:
    """Holds the numbers and texts of a launcher over hosts against what they can be.

    Raises:
        ConfigError: names the knob.
    """
    given = bool(knobs.hosts) + (knobs.hostfile is not None)
    if given == 2 or (hosts_needed and not given):
        said = "both name hosts" if given else "name none"
        raise ConfigError(
            f"launcher.hosts and launcher.hostfile {said}",
            fix=f"give one of them: launcher={knobs.name} launcher.hosts=[a,b:2]",
        )
    for name in ("processes_per_host", "threads_per_process", "num_processes"):
        value = getattr(knobs, name, None)
        if value not in ("auto", None) and (isinstance(value, bool) or value < 1):
            raise ConfigError(
                f"launcher.{name}={value} is no number of {name.partition('_')[0]}",
                fix="set it to 1 or more, or to auto",
            )
    for name in ("port", "ssh_port"):
        value = getattr(knobs, name, None)
        if value is not None and not 0 < value < 65536:
            raise ConfigError(f"launcher.{name}={value} is not a port", fix="choose 1 to 65535")
    for name, least in (("startup_timeout_s", 1.0), ("grace_s", 0.0), ("silence_s", 3.0)):
        value = getattr(knobs, name)
        if not least <= value < math.inf:
            raise ConfigError(
                f"launcher.{name}={value} is too short", fix=f"give {least:g} or more seconds"
            )
    for name in ("python", "folder", "address"):
        value = getattr(knobs, name)
        if value is not None and (not value or value.startswith("-") or _is_odd(value)):
            raise ConfigError(
                f"launcher.{name}={value!r} is no path or name",
                fix="leave out control characters, and a '-' at its beginning",
            )


def _is_odd(text: str) -> bool:
    return any(ord(char) < 32 or ord(char) == 127 for char in text)
