"""The network between hosts, tried: an all-reduce over all, and pair by pair where it is slow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from torsh_trainer.doctor.base import CheckResult
from torsh_trainer.doctor.examination import CheckReport
from torsh_trainer.doctor.ssh import Agent, ask_all

_LEAST_BANDWIDTH = 12.5e6
"""Bytes a second: a link of 100 Mbit/s."""

_MOST_PROMISED = 1.25e9
"""What a link of 10 Gbit/s carries, and one process over gloo at most."""

_SLOWER = 4
"""A pair is slow whose bandwidth is so many times below the others'."""

_SHORTEST_TIMEOUT_S, _LONGEST_TIMEOUT_S = 4.0, 10.0
_MOST_PAIRS = 28
_SHORTEST_S = 0.3
_LOOPBACK = "[127."
_STAGES = {
    "meet": "they cannot connect",
    "small": "they connect, and nothing comes through",
    "large": "small messages pass, and large ones are lost",
}


@dataclass(frozen=True)
class LinkResult:
    """An all-reduce among ``hosts``: seconds of a small one, bytes a second of large ones.

    ``stage`` says what failed (``meet``, ``small``, ``large``), and is empty where nothing did.
    """

    hosts: tuple[str, ...]
    stage: str = ""
    error: str = ""
    small_s: float = 0.0
    bandwidth: float = 0.0

    def __str__(self) -> str:
        if self.stage:
            return f"{_STAGES[self.stage]} ({self.error})"
        return f"{self.bandwidth / 1e6:.0f} MB/s, {self.small_s * 1000:.1f} ms for 16 bytes"


@dataclass(frozen=True)
class NetworkReport:
    """What was tried: all hosts, pairs where that was slow or failed, and what is wrong."""

    whole: LinkResult | None = None
    promised: float | None = None
    pairs: tuple[LinkResult, ...] = ()
    findings: tuple[CheckReport, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "all": asdict(self.whole) if self.whole is not None else None,
            "promised": self.promised,
            "pairs": [asdict(pair) for pair in self.pairs],
        }


def try_links(
    agents: Sequence[Agent], *, promised: float | None, port: int, seconds: float
) -> NetworkReport:
    """All-reduces for about ``seconds``; ``promised``: bytes a second that the slowest link has."""
    if len(agents) < 2:
        return NetworkReport()
    timeout_s = min(_LONGEST_TIMEOUT_S, max(_SHORTEST_TIMEOUT_S, seconds))
    ask_all(agents, "load_torch", [{}] * len(agents))  # so that all come to a trial together
    whole = _try(agents, port=port, seconds=seconds / 2, timeout_s=timeout_s)
    least = max(_LEAST_BANDWIDTH, min(promised or 0.0, _MOST_PROMISED) / 8)
    if not whole.stage and whole.bandwidth >= least:
        return NetworkReport(whole, promised)
    chosen = list(combinations(agents, 2))
    if len(chosen) > _MOST_PAIRS:
        chosen = [(agents[0], other) for other in agents[1:]]
    each = max(_SHORTEST_S, seconds / 2 / len(chosen))
    pairs = tuple(_try(pair, port=port, seconds=each, timeout_s=timeout_s) for pair in chosen)
    return NetworkReport(whole, promised, pairs, tuple(_judge(pairs, least)))


def _try(agents: Sequence[Agent], *, port: int, seconds: float, timeout_s: float) -> LinkResult:
    hosts = tuple(agent.host for agent in agents)
    trial = {
        "size": len(agents),
        "address": hosts[0].rpartition("@")[2],
        "port": port,
        "seconds": seconds,
        "timeout_s": timeout_s,
    }
    requests = [{"trial": {**trial, "rank": rank}} for rank in range(len(agents))]
    answers = ask_all(agents, "try_network", requests)
    failed = [told for told in answers if "error" in told]
    if failed:
        order = {stage: at for at, stage in enumerate(("large", "small", "meet"))}
        told = min(
            failed,
            key=lambda one: (order[one.get("stage", "meet")], _LOOPBACK not in one["error"]),
        )
        return LinkResult(hosts, told.get("stage", "meet"), told["error"])
    return LinkResult(
        hosts,
        small_s=max(told["small_s"] for told in answers),
        bandwidth=min(told["bandwidth"] for told in answers),
    )


def _judge(pairs: Sequence[LinkResult], least: float) -> Iterator[CheckReport]:
    """The link, or the host, that is slow or broken; none where every pair alone is quick."""
    quick = [pair.bandwidth for pair in pairs if not pair.stage and pair.bandwidth >= least]
    usual = statistics.median_high(quick) if quick else 0.0
    bad = [
        pair
        for pair in pairs
        if pair.stage or pair.bandwidth < least or pair.bandwidth < usual / _SLOWER
    ]
    if not bad:
        return
    good = {host for pair in pairs if pair not in bad for host in pair.hosts}
    shared = set.intersection(*(set(pair.hosts) for pair in bad)) - good
    worst = max(bad, key=lambda pair: (bool(pair.stage), -pair.bandwidth))
    others = f"; other links {usual / 1e6:.0f} MB/s" if len(bad) < len(pairs) and usual else ""
    if len(shared) == 1 and len(bad) > 1:
        name = f"the link of {next(iter(shared))} (to each of {len(bad)} others)"
    else:
        name = ", ".join("link " + " - ".join(pair.hosts) for pair in bad[:4])
    yield CheckReport(
        "network",
        CheckResult("finding", f"{name}: {worst}{others}", _fix(worst)),
        "every step waits until the slowest link has carried the gradients",
    )


def _fix(pair: LinkResult) -> str:
    one, other = (host.rpartition("@")[2] for host in pair.hosts[:2])
    if pair.stage == "large":
        return (
            f"on {one}: ping -M do -s 1472 {other} finds the size that fits; ip link set INTERFACE "
            "mtu N on both (MTU), or let ICMP 'fragmentation needed' through the firewall"
        )
    if pair.stage and _LOOPBACK in pair.error:
        return (
            f"a host name is the loopback's: on {one} and {other}, getent hosts $(hostname); write "
            "the host's own address for it into /etc/hosts, or export GLOO_SOCKET_IFNAME"
        )
    if pair.stage:
        return (
            f"on {one}: ping {other}; open TCP between the hosts (iptables -L -n), or name the "
            "interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        )
    return (
        f"iperf3 -s on {one}, iperf3 -c {one} on {other}; ethtool INTERFACE; change cable or port"
    )
