"""What hosts of one job have to have in common: names, clocks, versions, code, a folder."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torsh_trainer.doctor.base import CheckResult
from torsh_trainer.doctor.checks.network import is_loopback
from torsh_trainer.doctor.examination import CheckReport
from torsh_trainer.doctor.ssh import Agent, ask_all
from torsh_trainer.errors import ResourceError

_MOST_SKEW_S = 1.0
_SLOW_FOLDER_S = 3.0

Facts = Mapping[str, Mapping[str, Any]]
"""Host, as the user names it -> what it says of itself."""


def compare_hosts(
    agents: Sequence[Agent], facts: Facts, *, folder: Path, patience_s: float
) -> list[CheckReport]:
    """What is wrong between the hosts; ``folder`` is where runs go.

    ``patience_s`` is how long a file of one host may take to be seen by the others.

    Raises:
        ResourceError: a host is gone meanwhile.
    """
    if len(agents) < 2:
        return []
    found = [report for compare in _COMPARISONS for report in compare(facts)]
    found += _compare_clocks(agents)
    found += _look_for_marker(agents, folder, patience_s)
    return found


def _report(name: str, saw: str, *, why: str, fix: str) -> CheckReport:
    return CheckReport(name, CheckResult("finding", saw, fix), why)


def _compare_names(facts: Facts) -> Iterator[CheckReport]:
    """Each host finds each other by the name that the user gives it."""
    for asking, told in facts.items():
        for name, addresses in told["peers"].items():
            peer = next((host for host in facts if host.rpartition("@")[2] == name), asking)
            if peer == asking:  # itself, or one that was not reached
                continue
            if not addresses:
                yield _report(
                    "peer_names",
                    f"{asking} knows no address of {name}",
                    why="processes there cannot connect to those of that host, nor to rank 0 on it",
                    fix=f"on {asking}: echo 'ADDRESS {name}' >> /etc/hosts",
                )
            elif all(map(is_loopback, addresses)) or not (
                set(addresses) & set(facts[peer]["addresses"]) or _is_address(name)
            ):
                yield _report(
                    "peer_names",
                    f"on {asking} {name} is {', '.join(addresses)}, and that host has "
                    f"{', '.join(facts[peer]['addresses']) or 'no address'}",
                    why="what is sent there reaches another host, or none",
                    fix=f"on {asking}: correct {name} in /etc/hosts",
                )


def _compare_identity(facts: Facts) -> Iterator[CheckReport]:
    """No two names lead to one host, and no two hosts have one name."""
    for what in ("host", "addresses"):
        places: dict[str, list[str]] = defaultdict(list)
        for name, told in facts.items():
            places[str(told[what])].append(name)
        for value, names in places.items():
            if len(names) > 1 and value != "[]":
                yield _report(
                    "same_host",
                    f"{' and '.join(names)}: {'the host name' if what == 'host' else 'addresses'} "
                    f"{value}",
                    why="NCCL takes processes for neighbours that share memory where host names "
                    "are equal; and a host that is named twice gets twice the processes",
                    fix="hostnamectl set-hostname, another for each; or name each host once",
                )
                return


def _report_difference(
    name: str, what: str, said: Mapping[str, str], *, why: str, fix: str
) -> Iterator[CheckReport]:
    """A report where hosts say different things of ``what``."""
    if len(set(said.values())) > 1:
        yield _report(name, f"{what}: {_group(said)}", why=why, fix=fix)


def _compare_versions(facts: Facts) -> Iterator[CheckReport]:
    for name in next(iter(facts.values()))["versions"]:
        said = {host: told["versions"].get(name, "none") for host, told in facts.items()}
        if name == "Python":
            said = {host: ".".join(value.split(".")[:2]) for host, value in said.items()}
        yield from _report_difference(
            "versions_differ",
            name,
            said,
            why="processes of different versions exchange what the other does not expect: "
            "they hang, or compute different numbers without an error",
            fix="pip install the same versions on every host (pip freeze, constraints.txt)",
        )


def _compare_code(facts: Facts) -> Iterator[CheckReport]:
    for place in next(iter(facts.values()))["code"]:
        yield from _report_difference(
            "code_differs",
            f"Python files of {place}",
            {host: told["code"].get(place, "") or "none" for host, told in facts.items()},
            why="ranks that run different code issue different collectives: they hang, or "
            "train different models",
            fix=f"git pull on every host, or rsync -a {place}/ HOST:{place}/",
        )


def _compare_packet_sizes(facts: Facts) -> Iterator[CheckReport]:
    yield from _report_difference(
        "mtu_differs",
        "MTU",
        {host: ", ".join(sorted({str(m) for m in f["mtu"].values()})) for host, f in facts.items()},
        why="large packets of one host do not fit the link of the other: they vanish where no "
        "router says so, and large messages time out",
        fix="ip link set INTERFACE mtu N, the same on every host",
    )


def _compare_ranks(facts: Facts) -> Iterator[CheckReport]:
    for name in ("RANK", "NODE_RANK"):
        said = {h: f["variables"][name] for h, f in facts.items() if name in f["variables"]}
        if len(said) > len(set(said.values())):
            yield _report(
                "ranks_twice",
                f"{name}, as a login has it: {_group(said)}",
                why="two hosts believe to be the same rank: both write its files, and the world "
                "is never complete",
                fix=f"take {name} out of /etc/environment and ~/.profile",
            )


def _compare_clocks(agents: Sequence[Agent]) -> Iterator[CheckReport]:
    skews = {}
    for agent in agents:
        before = time.time()
        told = agent.ask("tell_time")["time"]
        skews[agent.host] = told - (before + time.time()) / 2
    apart = max(skews.values()) - min(skews.values())
    if apart > _MOST_SKEW_S:
        middle = sorted(skews.values())[len(skews) // 2]
        worst = max(skews, key=lambda host: abs(skews[host] - middle))
        yield _report(
            "clock_skew",
            f"clocks are {apart:.1f} s apart; {worst} is the farthest from the others",
            why="leases and rendezvous end early or late, newer files seem older, and logs "
            "cannot be put in order",
            fix=f"on {worst}: chronyc makestep (timedatectl set-ntp true)",
        )


def _look_for_marker(
    agents: Sequence[Agent], folder: Path, patience_s: float
) -> Iterator[CheckReport]:
    """A file that the first host writes is seen by the others, and soon."""
    first, *others = agents
    token = secrets.token_hex(8)
    written = first.ask("write_marker", folder=str(folder.absolute()), text=token)
    if written["refused"]:
        yield _report(
            "shared_folder",
            f"{first.host} cannot write to {written['refused']}",
            why="the first file of the run is refused, after the queue has been waited for",
            fix="give a folder that every host mounts and this user may write, with --dir",
        )
        return
    wanted = {"path": written["path"], "text": token, "patience_s": patience_s}
    try:
        answers = ask_all(others, "find_marker", [wanted] * len(others))
    finally:
        first.ask("remove_marker", path=written["path"])
    for told in answers:
        if "error" in told:
            raise ResourceError(told["error"], fix="look at that host again")
    seen = {agent.host: told.get("seen") for agent, told in zip(others, answers, strict=True)}
    blind = [host for host, after in seen.items() if after is None]
    if blind:
        yield _report(
            "shared_folder",
            f"a file that {first.host} writes to {Path(written['path']).parent} is not seen by "
            f"{', '.join(blind)}",
            why="ranks there find no checkpoint of the others, and leave theirs where nobody looks",
            fix="put runs on a file system that all hosts mount: --dir here, hydra.run.dir there",
        )
    slow = {host: after for host, after in seen.items() if after and after > _SLOW_FOLDER_S}
    if slow:
        host, after = max(slow.items(), key=lambda item: item[1])
        yield _report(
            "shared_folder",
            f"{host} sees a file {after:.1f} s after {first.host} has written it",
            why="a resume looks for checkpoints that are there and not yet to be seen",
            fix="mount -o actimeo=1 (NFS), or wait between runs",
        )


_COMPARISONS: tuple[Callable[[Facts], Iterator[CheckReport]], ...] = (
    _compare_names,
    _compare_identity,
    _compare_versions,
    _compare_code,
    _compare_packet_sizes,
    _compare_ranks,
)


def _group(said: Mapping[str, str]) -> str:
    """``2.13.0 on a, b; 2.12.1 on c``."""
    places: dict[str, list[str]] = defaultdict(list)
    for host, value in said.items():
        places[value].append(host)
    return "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in places.items())


def _is_address(name: str) -> bool:
    return name.replace(".", "").isdigit() or ":" in name
