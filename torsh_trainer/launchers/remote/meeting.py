"""Where the processes of several hosts meet: an address of the first that the others reach."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from torsh_trainer.environments.world import Rendezvous
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.remote.connection import AgentConnection, ask_all

_CONNECT_S = 4.0
_TOKEN_BYTES = 16


def choose_meeting(
    connections: Sequence[AgentConnection],
    greetings: Sequence[dict[str, Any]],
    *,
    address: str | None,
    port: int | None,
    timeout_s: float,
) -> tuple[Rendezvous, list[str]]:
    """Where the job meets, and the interface by which each host gets there.

    The first agent holds the port from now on, for rank 0. ``address`` and ``port`` None choose.
    Interfaces are empty on a single host.

    Raises:
        ConfigError: ``address`` is the loopback's.
        ResourceError: the port is in use, or no address of the first host is reached by all others.
    """
    first, *others = connections
    token = secrets.token_hex(_TOKEN_BYTES)
    if not others:
        place = address or "127.0.0.1"
        taken = _listen(first, place, port, timeout_s=timeout_s)
        return Rendezvous(place, taken, token=token), [""]
    candidates = _candidates(first, greetings[0], address, timeout_s=timeout_s)
    reasons: dict[str, str] = {}
    for candidate in candidates:
        try:
            taken = _listen(first, candidate, port, timeout_s=timeout_s)
        except ResourceError as error:
            if port is not None or candidate == candidates[-1]:
                raise
            reasons[candidate] = error.sentence
            continue
        wanted = {"address": candidate, "port": taken, "timeout_s": _CONNECT_S}
        tried = ask_all(others, "try_connection", [wanted] * len(others), timeout_s=timeout_s)
        failed = [c.host for c, answer in zip(others, tried, strict=True) if "refused" in answer]
        if not failed:
            own = first.ask("name_interface", timeout_s=timeout_s, address=candidate)
            names = [str(own["interface"]), *(str(answer["interface"]) for answer in tried)]
            return Rendezvous(candidate, taken, token=token), names
        why = next(str(answer["refused"]) for answer in tried if "refused" in answer)
        reasons[candidate] = f"not reached by {', '.join(failed)} ({why})"
    told = "; ".join(f"{name} is {why}" for name, why in reasons.items()) or "it has none but lo"
    raise ResourceError(
        f"{first.host} has no address at which the other hosts reach it: {told}",
        fix="open TCP between the hosts (iptables -L -n), or name an address: launcher.address",
        host=first.host,
    )


def _candidates(
    first: AgentConnection, greeting: dict[str, Any], address: str | None, *, timeout_s: float
) -> list[str]:
    if address is not None:
        answer = first.ask("find_addresses", timeout_s=timeout_s, name=address)
        found = [str(one) for one in answer["addresses"]]
        inward = next(filter(_is_loopback, found), None)
        if inward is not None:
            raise ConfigError(
                f"launcher.address={address} is {inward} on {first.host}: no other host reaches "
                "the loopback there",
                fix=f"name an address of its network, one of {', '.join(greeting['addresses'])}; "
                f"or correct {address} in its /etc/hosts",
            )
        if not found:
            raise ConfigError(
                f"launcher.address={address} is unknown on {first.host}: {answer['why']}",
                fix="give an address of that host, or null to have one chosen",
            )
        return found[:1]
    names = [str(greeting["arrived_at"]), *map(str, greeting["addresses"])]
    return [one for one in dict.fromkeys(names) if one and not _is_loopback(one)]


def _listen(first: AgentConnection, address: str, port: int | None, *, timeout_s: float) -> int:
    (answer,) = ask_all(
        [first], "listen", [{"address": address, "port": port or 0}], timeout_s=timeout_s
    )
    if "refused" in answer:
        raise ResourceError(
            f"{first.host}: port {port or 'any'} on {address} cannot be had: {answer['refused']}",
            fix="leave launcher.port=null for a free one, or choose another"
            if port
            else "name an address of that host: launcher.address",
            port=port,
        )
    return int(answer["port"])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
