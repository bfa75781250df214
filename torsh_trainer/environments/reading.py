"""Reading variables: typed, with a reason kept for each; and where the processes meet."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from torsh_trainer.environments.world import Rendezvous
from torsh_trainer.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
USUAL_PORT = 29500
FIRST_PORT, PORTS = 20000, 10000
"""Derived ports lie in [20000, 30000): below Linux's ephemeral range, which starts at 32768."""


class Reading:
    """Reads ``env`` for the environment ``source`` and remembers what each variable decided."""

    def __init__(self, env: Mapping[str, str], source: str) -> None:
        self.env = env
        self.source = source
        self.reasons: list[str] = []

    def __contains__(self, name: str) -> bool:
        return is_set(self.env, name)

    def text(self, *names: str, means: str) -> str | None:
        """The first of ``names`` that is set and not empty, or None."""
        for name in names:
            if name in self:
                value = self.env[name].strip()
                self.reasons.append(f"{name}={value} -> {means} {value}")
                return value
        return None

    def integer(self, *names: str, means: str) -> int | None:
        """As ``text``, but a whole number that is not negative.

        Raises:
            ConfigError: it is something else.
        """
        for name in names:
            if name in self:
                value = number(self.env, name)
                self.reasons.append(f"{name}={value} -> {means} {value}")
                return value
        return None

    def conclude(self, reason: str) -> None:
        """Keeps a reason that is not a variable's value alone."""
        self.reasons.append(reason)

    def rendezvous(
        self,
        *,
        one_node: bool,
        host: str | None = None,
        job: Sequence[str] = (),
        hosted: bool = False,
        fix: str = "set MASTER_ADDR to the host on which rank 0 runs, the same on every node",
    ) -> Rendezvous:
        """Where the job meets: MASTER_ADDR and MASTER_PORT, or what can be derived without them.

        The address is the loopback on one node, else ``host`` (rank 0's, as the cluster lists it).
        The port is derived from the variables ``job``, which name the job and are the same in all
        its processes; without any it is torch's usual 29500.

        Raises:
            ConfigError: there are several nodes and nothing says where rank 0 runs.
        """
        address = self.text("MASTER_ADDR", means="address")
        if address is None:
            if one_node:
                address = "127.0.0.1"
                self.conclude("one node and no MASTER_ADDR -> address 127.0.0.1")
            elif host is not None:
                address = host
            else:
                raise ConfigError(
                    f"{self.source}: there are several nodes, but MASTER_ADDR is not set", fix=fix
                )
        return Rendezvous(address, self._port(job), hosted=hosted)

    def _port(self, job: Sequence[str]) -> int:
        port = self.integer("MASTER_PORT", means="port")
        if port is not None:
            if not 0 < port < 65536:
                raise ConfigError(
                    f"MASTER_PORT={port} is not a port",
                    fix="choose one in 1024..65535, or unset it",
                )
            return port
        known = [name for name in job if name in self]
        if not known:
            self.conclude(f"nothing names this job, no MASTER_PORT -> port {USUAL_PORT}")
            return USUAL_PORT
        port = derive_port(*(self.env[name].strip() for name in known))
        self.conclude(f"no MASTER_PORT; {', '.join(known)} -> port {port}")
        return port


def is_set(env: Mapping[str, str], name: str) -> bool:
    """An empty variable counts as unset: a missing Kubernetes annotation arrives as one."""
    return bool(env.get(name, "").strip())


def number(env: Mapping[str, str], name: str) -> int:
    """The whole number in ``name``, which is set.

    Raises:
        ConfigError: it is not a whole number, or negative.
    """
    text = env[name].strip()
    if not text.isascii() or not text.isdigit():
        raise ConfigError(
            f"{name}={text!r} is not a whole number",
            fix=f"correct {name}, or unset it; launcher.explain=true prints what is set",
            name=name,
            value=text,
        )
    return int(text)


def missing(env: Mapping[str, str], *names: str) -> str:
    """``A, B are not set``, for those that are not."""
    absent = [name for name in names if not is_set(env, name)]
    return f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not set"


def derive_port(*parts: str) -> int:
    """A port that all processes of one job compute alike, and two jobs rarely share."""
    return FIRST_PORT + zlib.crc32("\0".join(parts).encode()) % PORTS


def node_of(
    rank: int, size: int, local_rank: int, local_size: int, reading: Reading
) -> tuple[int, int]:
    """(node_rank, nodes) where a launcher tells ranks and local ranks, but no node numbers."""
    nodes = -(-size // local_size)
    if rank % local_size == local_rank:  # ranks fill one node after the other
        return min(rank // local_size, nodes - 1), nodes
    if rank // nodes == local_rank:  # ranks are dealt out to the nodes in turn
        return rank % nodes, nodes
    reading.conclude("nodes hold unequal numbers of processes -> node number estimated")
    return min(rank // local_size, nodes - 1), nodes


def first_rank(node: int, *, per_node: int, size: int, name: str) -> int:
    """The first rank of the node whose NODE_RANK is ``node``.

    NODE_RANK is the node's number by custom; scripts that write the node's first rank into it
    (0, 4, 8, ... with four processes a node) are understood when it cannot be a number.

    Raises:
        ConfigError: it is neither.
    """
    nodes, rest = divmod(size, per_node)
    if rest:
        raise ConfigError(
            f"a world of {size} processes cannot be cut into nodes of {per_node}",
            fix="make WORLD_SIZE a multiple of the processes per node",
        )
    if node < nodes:
        return node * per_node
    if node < size and node % per_node == 0:
        return node
    raise ConfigError(
        f"{name}={node} is neither a node's number (0..{nodes - 1}) nor a node's first rank "
        f"in a world of {size} with {per_node} processes per node",
        fix=f"correct {name}, WORLD_SIZE or the processes per node",
        name=name,
        value=node,
    )
