"""``doctor --hosts``: the checks on every host, what differs between them, and their network."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torsh_trainer.doctor.between import compare_hosts
from torsh_trainer.doctor.links import try_links
from torsh_trainer.doctor.output import FOUND, print_json, show
from torsh_trainer.doctor.report import write_hosts
from torsh_trainer.doctor.ssh import Agent, SshOptions, parse_hosts
from torsh_trainer.environments.reading import USUAL_PORT
from torsh_trainer.errors import ResourceError
from torsh_trainer.utils import registry

_LOOK_TIMEOUT_S = 120.0
_LEAST_PATIENCE_S = 3.0
_REPLACED = ("run_directory_shared",)
"""Checks that a look from several hosts at once answers better."""


def examine_hosts(options: argparse.Namespace, *, only: Sequence[str]) -> int:
    """Looks at all hosts that ``options`` name, and at what is between them; the exit code.

    Raises:
        ConfigError: the list of hosts makes no sense.
        ResourceError: there is no ssh here.
    """
    names = parse_hosts(options.hosts)
    if shutil.which("ssh") is None:
        raise ResourceError(
            "--hosts needs ssh, which is not here", fix="apt install openssh-client"
        )
    ssh = SshOptions(tuple(options.ssh), options.python or sys.executable)
    agents = [Agent(name, ssh) for name in names]
    try:
        looked = _look_at_all(agents, options, only=only)
        reached = [agent for agent in agents if not isinstance(looked[agent.host], ResourceError)]
        answers = {agent.host: looked[agent.host] for agent in reached}
        between = compare_hosts(
            reached,
            {name: one["facts"] for name, one in answers.items()},
            folder=options.dir,
            patience_s=max(_LEAST_PATIENCE_S, options.seconds),
        )
        network = try_links(
            reached,
            promised=_find_promise(answers),
            port=options.port or USUAL_PORT,
            seconds=options.seconds,
        )
    finally:
        for agent in agents:
            agent.__exit__()
    unreached = {name: one for name, one in looked.items() if isinstance(one, ResourceError)}
    told = {
        "hosts": [one["examination"] for one in answers.values()],
        "unreached": {name: str(error) for name, error in unreached.items()},
        "between": [one.as_dict() for one in (*between, *network.findings)],
        "network": network.as_dict(),
    }
    if options.json:
        print_json(told)
    else:
        show(write_hosts(told, show_all=options.all))
    wrong = unreached or told["between"] or any(one["findings"] for one in told["hosts"])
    return FOUND if wrong else 0


def _look_at_all(
    agents: Sequence[Agent], options: argparse.Namespace, *, only: Sequence[str]
) -> dict[str, Any]:
    """Host -> its answer, or the error that kept it."""
    names = only or [name for name in registry.CHECKS.registrations() if name not in _REPLACED]
    request = {
        "dir": str(options.dir.absolute()),
        "folder": str(Path.cwd()),
        "nodes": options.nodes or len(agents),
        "processes": options.processes or 0,
        "port": options.port or 0,
        "only": list(names),
        "peers": [agent.host.rpartition("@")[2] for agent in agents],
    }

    def look(agent: Agent) -> Any:
        try:
            return agent.ask("examine", timeout_s=_LOOK_TIMEOUT_S, **request)
        except ResourceError as error:
            return error

    with ThreadPoolExecutor(len(agents)) as pool:
        return dict(zip((a.host for a in agents), pool.map(look, agents), strict=True))


def _find_promise(answers: Mapping[str, Any]) -> float | None:
    """Bytes a second of the slowest link between hosts, where all say theirs."""
    speeds = [
        max((speed for speed in told["facts"]["speed"].values() if speed and speed > 0), default=0)
        for told in answers.values()
    ]
    return min(speeds) * 1e6 / 8 if speeds and all(speeds) else None
