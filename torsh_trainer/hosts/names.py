"""The hosts of a job, as users write them: a list of names, or a hostfile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.utils.files import check_plain

_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.:-]*", re.ASCII)
_PLAIN = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*", re.ASCII)
_LISTED = re.compile(r"(?P<name>[^:\[\]]+|(?:[^@\[\]]*@)?\[[^\[\]]*\])(?::(?P<slots>\d{1,6}))?")
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class JobHost:
    """A host of a job; ``slots`` are the processes that it has room for, None where none says."""

    name: str
    slots: int | None = None

    @property
    def bare(self) -> str:
        """The name without a user."""
        return self.name.rpartition("@")[2]


def is_host_name(text: str) -> bool:
    """Whether ssh can be given ``text`` for a host: ``[user@]name``, and never for an option."""
    return _NAME.fullmatch(text) is not None


def read_hosts(entries: Sequence[str], *, option: str) -> tuple[JobHost, ...]:
    """The hosts of a list: ``a``, ``b:2`` (with its slots), ``[fd00::1]:2``.

    Raises:
        ConfigError: one is no name of a host, has no slots, or stands twice; names ``option``.
    """
    found = []
    for entry in entries:
        match = _LISTED.fullmatch(entry.strip())
        name = "" if match is None else _open_brackets(match["name"])
        if match is None or not name:
            raise ConfigError(
                f"{option}: {entry!r} is no name of a host",
                fix="write HOST, USER@HOST or HOST:SLOTS; an address of IPv6 in brackets",
            )
        found.append(JobHost(name, _count(match["slots"], f"{option}: {entry}")))
    return _check_apart(found, option)


def read_hostfile(path: Path, *, option: str) -> tuple[JobHost, ...]:
    """The hosts of a file with a line for each: ``host``, ``host slots=2`` or ``host:2``.

    Open MPI, DeepSpeed and horovodrun write the second, MPICH and Intel MPI the third. What stands
    behind ``#`` is a remark.

    Raises:
        ConfigError: there is no such file, or a line of it is something else; says which.
        ResourceError: it cannot be read.
    """
    where = f"{option}={path}"
    hosts = []
    for number, line in enumerate(_read_lines(path, where), start=1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_read_line(words, f"{where}, line {number}"))
    return _check_apart(hosts, where)


def _read_line(words: Sequence[str], where: str) -> JobHost:
    (host,) = read_hosts(words[:1], option=where)
    slots = [word for word in words[1:] if word.startswith("slots=")]
    others = [word for word in words[1:] if word not in slots]
    if others or len(slots) + (host.slots is not None) > 1:
        odd = others[0] if others else slots[-1]
        raise ConfigError(
            f"{where}: {odd!r} is not understood", fix="a line is HOST slots=N, or HOST alone"
        )
    if not slots:
        return host
    return JobHost(host.name, _count(slots[0].removeprefix("slots="), where))


def _read_lines(path: Path, where: str) -> list[str]:
    if not path.exists():
        raise ConfigError(f"{where}: there is no such file", fix="a line is HOST slots=N")
    check_plain(path)
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ResourceError(
            f"{where} cannot be read: {error.strerror}", fix="change its permissions"
        ) from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{where} is no list of hosts: it is too large", fix="name another file")
    return data.decode("utf-8", errors="replace").splitlines()


def _open_brackets(text: str) -> str:
    user, at, name = text.rpartition("@")
    inside = name.removeprefix("[").removesuffix("]")
    whole = f"{user}{at}{inside}"
    plain = _NAME if inside != name and ":" in inside else _PLAIN
    return whole if plain.fullmatch(whole) else ""


def _count(text: str | None, where: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1_000_000):
        raise ConfigError(f"{where}: {text!r} is no number of slots", fix="give 1 or more")
    return int(text)


def _check_apart(hosts: Iterable[JobHost], where: str) -> tuple[JobHost, ...]:
    found = tuple(hosts)
    if not found:
        raise ConfigError(f"{where} names no host", fix="name one or more: HOST, or HOST slots=N")
    names = [host.bare for host in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{where} names {name} twice", fix=f"name it once, with the sum: {name} slots=N"
            )
    return found
