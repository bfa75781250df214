"""Names, interfaces, ports and links of this host."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import time
from pathlib import Path

from torsh_trainer.doctor.base import (
    Check,
    CheckResult,
    pass_check,
    report_finding,
    skip_check,
)
from torsh_trainer.doctor.machine import Machine, find_addresses, wait_for
from torsh_trainer.environments.reading import LOOPBACK
from torsh_trainer.hosts.interfaces import (
    Interface,
    choose_for_gloo,
    choose_for_nccl,
    list_interfaces,
    matches_nccl,
)

_SLOW_LOOKUP_S = 0.8
_LOOKUP_TIMEOUT_S = 12.0
_CONNECT_TIMEOUT_S = 2.0
_LEAST_MTU = 1280
_LEAST_PORTS = 2000
_LEAST_MBIT = 1000
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def is_loopback(address: str) -> bool:
    """``127.0.0.0/8`` or ``::1``."""
    return address.startswith("127.") or address == "::1"


class HostName(Check):
    """The host name has an address."""

    why = (
        "torchrun and gloo look up the host's own name: without an address they hang at the start, "
        "or say that the rendezvous host does not know itself"
    )

    def look(self, machine: Machine) -> CheckResult:
        name = socket.gethostname()
        addresses = wait_for(lambda: find_addresses(name), timeout_s=_LOOKUP_TIMEOUT_S)
        if addresses:
            return pass_check(f"{name} is {', '.join(sorted(addresses))}")
        saw = f"{name} has no address" if addresses is not None else f"no answer about {name}"
        own = next((one.address for one in _outward()), "ADDRESS")
        return report_finding(saw, fix=f"echo '{own} {name}' >> /etc/hosts")


class HostNameLoopback(Check):
    """With several hosts: the host name is not an address of the loopback."""

    why = (
        "gloo tells the other hosts the address that this host's name resolves to: told 127.0.1.1, "
        "they connect to themselves (connectFullMesh: Connection refused)"
    )

    def look(self, machine: Machine) -> CheckResult:
        name = socket.gethostname()
        addresses = find_addresses(name)
        outward = [address for address in addresses if not is_loopback(address)]
        if outward or not addresses or machine.job_nodes < 2:
            note = "" if outward or not addresses else ", which one host can live with"
            return pass_check(f"{name} is {', '.join(sorted(addresses)) or 'unknown'}{note}")
        if interface := machine.env.get("GLOO_SOCKET_IFNAME", "").strip():
            return pass_check(f"{name} is {min(addresses)}, but GLOO_SOCKET_IFNAME={interface}")
        own = next(iter(_outward()), None)
        fix = "give this host a network interface beside the loopback"
        if own is not None:
            fix = (
                f"in /etc/hosts write '{own.address} {name}' for the line with {min(addresses)}, "
                f"or export GLOO_SOCKET_IFNAME={own.name}"
            )
        return report_finding(f"{name} is {', '.join(sorted(addresses))}", fix=fix)


class ReverseLookup(Check):
    """Looking up the host's own full name is quick."""

    why = (
        "every process looks its own full name up as it starts (getfqdn): a name server that "
        "does not answer adds its time-out to each start, and torchrun seems to hang"
    )

    def look(self, machine: Machine) -> CheckResult:
        started = time.monotonic()
        address = next((one.address for one in _outward()), "127.0.0.1")
        wait_for(lambda: socket.getfqdn(address), timeout_s=_LOOKUP_TIMEOUT_S)
        took = time.monotonic() - started
        saw = f"the name of {address} took {took:.1f} s"
        if took < _SLOW_LOOKUP_S:
            return pass_check(saw)
        name = socket.gethostname()
        return report_finding(
            saw,
            fix=f"echo '{address} {name}' >> /etc/hosts, or name servers that answer in "
            "/etc/resolv.conf",
        )


class InterfaceVariables(Check):
    """Variables that choose an interface name one that this host has, and that is up."""

    why = (
        "gloo and NCCL stop with 'no socket interface found' or 'Unable to find address' where the "
        "variable names no interface, and gloo takes names alone, not NCCL's ^ and ="
    )
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

    def look(self, machine: Machine) -> CheckResult:
        interfaces = list_interfaces()
        usable = [one for one in interfaces if one.is_up and one.address]
        known = ", ".join(str(one) for one in usable) or "none that is up"
        seen = []
        for name in self.variables:
            rule = machine.env.get(name, "").strip()
            if not rule:
                continue
            if name == "NCCL_SOCKET_IFNAME":
                is_wrong = not any(matches_nccl(one.name, rule) for one in usable)
            else:
                is_wrong = any(all(one.name != text for one in usable) for text in rule.split(","))
            if is_wrong:
                best = next((one.name for one in _outward()), "lo")
                return report_finding(
                    f"{name}={rule}, and this host has {known}", fix=f"export {name}={best}"
                )
            seen.append(f"{name}={rule}")
        return pass_check(", ".join(seen) or f"none is set; interfaces: {known}")


class Interfaces(Check):
    """With several hosts: gloo and NCCL would take an interface that other hosts reach."""

    why = (
        "a bridge of docker, a tunnel or the loopback carries nothing to another host: processes "
        "meet, and the first collective times out (ncclSystemError, connectFullMesh)"
    )

    def look(self, machine: Machine) -> CheckResult:
        interfaces = list_interfaces()
        gloo = choose_for_gloo(interfaces, machine.env, find_addresses(socket.gethostname()))
        nccl = choose_for_nccl(interfaces, machine.env)
        said = ", ".join(str(one) for one in nccl) or "nothing"
        saw = f"gloo would take {gloo or 'nothing'}, NCCL {said}"
        if machine.job_nodes < 2:
            return pass_check(saw)
        wrong = [one for one in (gloo, *nccl[:1]) if one is None or is_inward(one)]
        if not wrong and nccl:
            return pass_check(saw)
        best = next(iter(_outward()), None)
        if best is None:
            return report_finding(saw, fix="ip link; give this host an interface and an address")
        return report_finding(
            saw,
            fix=f"export GLOO_SOCKET_IFNAME={best.name} NCCL_SOCKET_IFNAME={best.name}",
        )


class MasterAddress(Check):
    """MASTER_ADDR has an address, and not the loopback's where there are several hosts."""

    why = (
        "every process asks the store of rank 0 there: without an address none finds it (client "
        "socket has timed out), and with the loopback each host waits for itself"
    )

    def look(self, machine: Machine) -> CheckResult:
        name = machine.env.get("MASTER_ADDR", "").strip()
        if not name:
            return skip_check("MASTER_ADDR is not set")
        addresses = wait_for(lambda: find_addresses(name), timeout_s=_LOOKUP_TIMEOUT_S)
        if not addresses:
            return report_finding(
                f"MASTER_ADDR={name} has no address here",
                fix=f"getent hosts {name}; write it into /etc/hosts, or export its address",
            )
        saw = f"MASTER_ADDR={name} is {', '.join(sorted(addresses))}"
        if machine.job_nodes > 1 and all(map(is_loopback, addresses)):
            return report_finding(
                f"{saw}, for {machine.job_nodes} hosts",
                fix="export MASTER_ADDR=ADDRESS, the one that the other hosts know rank 0's by",
            )
        return pass_check(saw)


class MasterPort(Check):
    """The port that the job meets at is free here, where this host serves it."""

    why = (
        "rank 0 listens there: a port that another program has ends the start (Address already "
        "in use), or joins the job to somebody else's"
    )

    def look(self, machine: Machine) -> CheckResult:
        port = machine.job_port
        if not machine.serves_store:
            return skip_check(f"port {port} is another's to serve: rank 0's, or torchrun's agent's")
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                _bind(family, address, port)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    holder = _find_holder(machine, port)
                    return report_finding(
                        f"port {port}: {error.strerror}{holder}",
                        fix=f"ss -ltnp 'sport = :{port}'; end that program, or export "
                        f"MASTER_PORT={_find_free_port()}",
                    )
        return pass_check(f"port {port} is free")


class MasterReachable(Check):
    """From a host that is not the first: MASTER_ADDR answers, or refuses at once."""

    why = (
        "a firewall that drops what comes to the port is silence: every other host waits until "
        "its time-out (client socket has timed out after 60s)"
    )

    def look(self, machine: Machine) -> CheckResult:
        name, port = machine.env.get("MASTER_ADDR", "").strip(), machine.job_port
        if not name or machine.is_master:
            return skip_check("MASTER_ADDR is not set" if not name else "this host is the first")
        if not find_addresses(name):
            return skip_check(f"MASTER_ADDR={name} has no address")
        started = time.monotonic()
        try:
            socket.create_connection((name, port), timeout=_CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return pass_check(f"{name}:{port} refuses: it is there, and nothing listens yet")
        except OSError as error:
            reason = error.strerror or "no answer"
            took = time.monotonic() - started
            return report_finding(
                f"{name}:{port}: {reason} after {took:.1f} s",
                fix=f"nc -vz {name} {port}; open the port on {name} "
                f"(iptables -I INPUT -p tcp --dport {port} -j ACCEPT), or correct MASTER_ADDR",
            )
        return pass_check(f"{name}:{port} answers")


class Firewall(Check):
    """This host takes connections to its own address, at the job's port and at any other."""

    why = (
        "gloo and NCCL connect at ports that the system chooses (ip_local_port_range): a firewall "
        "that opens the port of MASTER_PORT alone lets processes meet, and then hangs them"
    )

    def look(self, machine: Machine) -> CheckResult:
        if found := self._find_closed(machine):
            return found
        rules = machine.ask(["iptables", "-S", "INPUT"])
        if rules.code == 0:
            drops = "-P INPUT DROP" in rules.out or bool(
                re.search(r"^-A INPUT -j (DROP|REJECT)\b", rules.out, re.MULTILINE)
            )
        else:
            rules = machine.ask(["nft", "list", "ruleset"])
            drops = bool(re.search(r"hook input [^;]*; policy drop", rules.out))
        if rules.code != 0:
            why = "its rules cannot be read (root reads them)"
            return pass_check(f"connections to its own address come through; {why}")
        low, high = _local_ports(machine)
        if drops and machine.job_nodes > 1 and not _opens(rules.out, low, high):
            return report_finding(
                f"the firewall drops what no rule allows, and no rule allows {low}-{high}",
                fix=f"iptables -I INPUT -s NETWORK -p tcp --dport {low}:{high} -j ACCEPT, with the "
                "network of the job's hosts",
            )
        return pass_check("connections to its own address come through, and no rule stands against")

    def _find_closed(self, machine: Machine) -> CheckResult | None:
        addresses = [one.address for one in _outward()] or ["127.0.0.1"]
        for port in (machine.job_port, 0) if machine.serves_store else (0,):
            try:
                with socket.create_server((addresses[0], port)) as server:
                    number = server.getsockname()[1]
                    socket.create_connection(
                        (addresses[0], number), timeout=_CONNECT_TIMEOUT_S
                    ).close()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue  # the check `master_port` says so
                reason = error.strerror or "no answer"
                at = number if port == 0 else port
                return report_finding(
                    f"connecting to {addresses[0]}:{at}, which listens here: {reason}",
                    fix=f"iptables -L INPUT -n; iptables -I INPUT -p tcp --dport {at} -j ACCEPT",
                )
        return None


class LocalPorts(Check):
    """The range of ports that the system gives out is large, and leaves out the job's port."""

    why = (
        "every pair of processes takes several ports; and a port of MASTER_PORT within the range "
        "may be taken by any outgoing connection a moment before the job starts"
    )

    def look(self, machine: Machine) -> CheckResult:
        low, high = _local_ports(machine)
        saw = f"net.ipv4.ip_local_port_range is {low}-{high}"
        if high - low + 1 < _LEAST_PORTS:
            return report_finding(saw, fix="sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
        said = machine.port or machine.env.get("MASTER_PORT")
        if said and machine.serves_store and low <= machine.job_port <= high:
            reserved = machine.read("/proc/sys/net/ipv4/ip_local_reserved_ports") or ""
            if str(machine.job_port) not in reserved:
                return report_finding(
                    f"{saw}, with the job's port {machine.job_port} in it",
                    fix=f"export MASTER_PORT=29500, or sysctl -w "
                    f"net.ipv4.ip_local_reserved_ports={machine.job_port}",
                )
        return pass_check(saw)


class Mtu(Check):
    """The interfaces that a job would take carry packets of a usual size (MTU)."""

    why = (
        "where one link carries smaller packets than the hosts send, small messages pass and large "
        "ones vanish: the job meets, and its first large all-reduce times out"
    )

    def look(self, machine: Machine) -> CheckResult:
        known = {one.name: one.mtu for one in _outward()}
        if not known:
            return skip_check("no interface beside the loopback")
        saw = ", ".join(f"{name} {size}" for name, size in known.items())
        for name, size in known.items():
            if size < _LEAST_MTU:
                return report_finding(saw, fix=f"ip link set {name} mtu 1500")
        return pass_check(saw)


class LinkSpeed(Check):
    """With several hosts: the links of the job carry a gigabit or more, with few errors."""

    why = (
        "every step waits for the slowest link; one that negotiated 100 Mbit/s, or repeats what "
        "it loses, slows all hosts to its speed"
    )

    def look(self, machine: Machine) -> CheckResult:
        seen = []
        for one in _outward():
            base = f"/sys/class/net/{one.name}"
            speed = machine.read_number(f"{base}/speed") or -1
            errors, packets = (
                machine.read_number(f"{base}/statistics/{name}") or 0
                for name in ("rx_errors", "rx_packets")
            )
            seen.append(f"{one.name} {speed if speed > 0 else '?'} Mbit/s, {errors} errors")
            if machine.job_nodes > 1 and 0 < speed < _LEAST_MBIT:
                return report_finding(
                    seen[-1],
                    fix=f"ethtool {one.name}; change cable or port, or name another "
                    "interface with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
                )
            if errors > 100 and errors > packets / 10_000:
                return report_finding(
                    f"{seen[-1]} in {packets} packets",
                    fix=f"ethtool -S {one.name}; change cable or port",
                )
        return pass_check("; ".join(seen)) if seen else skip_check("no interface but the loopback")


class Proxies(Check):
    """Where a proxy is set, hosts of the job are reached without it."""

    why = (
        "what speaks HTTP within the job (etcd rendezvous, trackers, metrics) goes to the proxy, "
        "which does not know these hosts: requests hang, or end with 403 and 503"
    )

    def look(self, machine: Machine) -> CheckResult:
        env = {name.lower(): value for name, value in machine.env.items()}
        used = [f"{name}={env[name]}" for name in _PROXIES if env.get(name, "").strip()]
        if not used:
            return pass_check("no proxy is set")
        without = {text.strip() for text in env.get("no_proxy", "").split(",")}
        master = machine.env.get("MASTER_ADDR", "").strip()
        wanted = ["localhost", "127.0.0.1", *([master] if master else [])]
        lacking = [host for host in wanted if not _is_exempt(host, without)]
        saw = f"{', '.join(used)}; no_proxy={env.get('no_proxy', '')}"
        if not lacking:
            return pass_check(saw)
        listed = ",".join(sorted(without - {""}) + lacking)
        return report_finding(saw, fix=f"export no_proxy={listed} NO_PROXY={listed}")


def is_inward(interface: Interface) -> bool:
    """No other host reaches it."""
    return interface.is_loopback or interface.is_virtual


def _outward() -> list[Interface]:
    """Interfaces that reach other hosts, by their names."""
    return [one for one in list_interfaces() if one.is_up and one.address and not is_inward(one)]


def _bind(family: int, address: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.bind((address, port))
        server.listen(1)


def _find_free_port() -> int:
    """One that nobody has now, below the range that the system gives out."""
    for port in range(29501, 29600):
        with contextlib.suppress(OSError):
            _bind(socket.AF_INET, "0.0.0.0", port)
            return port
    return 29600


def _find_holder(machine: Machine, port: int) -> str:
    """`` (pid 12, python)``: whose socket listens there, where the host shows it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (machine.read(table) or "").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()) in inodes:
                pid = link.parts[2]
                return f" (pid {pid}, {(machine.read(f'/proc/{pid}/comm') or '?').strip()})"
    return ""


def _local_ports(machine: Machine) -> tuple[int, int]:
    text = (machine.read("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    return (int(text[0]), int(text[1])) if len(text) == 2 else (32768, 60999)


def _opens(rules: str, low: int, high: int) -> bool:
    """Whether a rule of iptables or nftables allows new connections to all those ports, or any."""
    for line in rules.splitlines():
        is_input = line.startswith("-A INPUT") and line.endswith("-j ACCEPT")
        if not is_input and not re.match(r"\s+[^#]*\baccept$", line):
            continue
        if re.search(
            r"-i lo\b|iif(name)? \"?lo|established|-p (icmp|udp)|icmp|udp dport", line, re.I
        ):
            continue
        ports = re.search(r"--?dports? (\d+)(?::(\d+))?|dport (\d+)(?:-(\d+))?", line)
        if ports is None:
            return True
        first, last = (int(text) for text in (ports[1] or ports[3], ports[2] or ports[4] or 0))
        if first <= low and (last or first) >= high:
            return True
    return False


def _is_exempt(host: str, without: set[str]) -> bool:
    if without & {"*", host} or any(
        text.startswith(".") and host.endswith(text) for text in without
    ):
        return True
    return host in LOOPBACK and bool(without & {"127.0.0.0/8"}) and host != "localhost"
