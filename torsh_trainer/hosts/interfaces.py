"""The network interfaces of this host, and those that gloo and NCCL would take.

gloo, as torch makes it: the interface that GLOO_SOCKET_IFNAME names, else the one with the address
that the host name resolves to, else the loopback. NCCL: those that NCCL_SOCKET_IFNAME allows (names
are beginnings; ``=`` whole, ``^`` all but), else those called ``ib...``, else all but ``docker...``
and ``lo``, else ``docker...``, else ``lo`` (its environment variables, and ``ncclFindInterfaces``).
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ADDRESS, _FLAGS, _MTU = 0x8915, 0x8913, 0x8921  # SIOCGIFADDR, ..FLAGS, ..MTU of Linux
_UP, _LOOPBACK = 0x1, 0x8
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "tun", "tap", "podman")
"""Beginnings of names that bridges and tunnels of one host have: other hosts do not reach them."""


@dataclass(frozen=True)
class Interface:
    """A network interface; ``address`` is its first IPv4 address, empty where it has none.

    ``mtu`` in bytes.
    """

    name: str
    address: str
    is_up: bool
    is_loopback: bool
    mtu: int = 0

    @property
    def is_virtual(self) -> bool:
        """By its name it joins containers or guests of this host, and reaches no other host."""
        return self.name.startswith(_VIRTUAL)

    def __str__(self) -> str:
        return f"{self.name} ({self.address or 'no address'})"


def list_interfaces() -> list[Interface]:
    """The interfaces of this host, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asks.fileno(), _FLAGS, request)
            except OSError:  # gone since
                continue
            flags = struct.unpack("H", answer[16:18])[0]
            mtu = struct.unpack("i", fcntl.ioctl(asks.fileno(), _MTU, request)[16:20])[0]
            try:
                packed = fcntl.ioctl(asks.fileno(), _ADDRESS, request)[20:24]
                address = socket.inet_ntoa(packed)
            except OSError:
                address = ""
            found.append(Interface(name, address, bool(flags & _UP), bool(flags & _LOOPBACK), mtu))
    return found


def choose_for_gloo(
    interfaces: Sequence[Interface], env: Mapping[str, str], addresses: set[str]
) -> Interface | None:
    """The interface that gloo would take; ``addresses`` are those of the host name."""
    if name := env.get("GLOO_SOCKET_IFNAME", "").strip():
        return next((one for one in interfaces if one.name == name.split(",")[0]), None)
    named = next((one for one in interfaces if one.address in addresses and one.is_up), None)
    return named or next((one for one in interfaces if one.is_loopback), None)


def choose_for_nccl(interfaces: Sequence[Interface], env: Mapping[str, str]) -> list[Interface]:
    """The interfaces that NCCL's sockets would take, the first of which its processes meet over."""
    usable = [one for one in interfaces if one.is_up and one.address]
    if rule := env.get("NCCL_SOCKET_IFNAME", "").strip():
        return [one for one in usable if matches_nccl(one.name, rule)]
    for wanted in ("ib", "^docker,lo", "docker", "lo"):
        if found := [one for one in usable if matches_nccl(one.name, wanted)]:
            return found
    return []


def matches_nccl(name: str, rule: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME=``rule`` allows the interface ``name``."""
    others, rule = rule.startswith("^"), rule.removeprefix("^")
    whole, rule = rule.startswith("="), rule.removeprefix("=")
    names = [text.partition(":")[0] for text in rule.split(",") if text]
    found = any(name == text if whole else name.startswith(text) for text in names)
    return found is not others
