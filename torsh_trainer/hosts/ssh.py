"""OpenSSH's own client as the way to other hosts: its words, and why it did not get there."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torsh_trainer.errors import ResourceError

CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True)
class SshWords:
    """The words of a call of ssh: options of the user, and after how much silence it gives up.

    ``further`` are options that only a program needs. It asks nothing, and checks keys of hosts as
    the user's configuration says.
    """

    options: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    alive_s: int = 5
    silences: int = 3

    def reaching(self, host: str) -> str:
        """What a user types to try it."""
        return shlex.join(["ssh", *self.options, host])

    def running(self, host: str, remote: str) -> list[str]:
        """An argument list that has the shell of ``host`` run ``remote``, which is quoted.

        Of an option that is said twice ssh takes the first: the user's.
        """
        timeouts = {
            "BatchMode": "yes",
            "ConnectTimeout": CONNECT_TIMEOUT_S,
            "ServerAliveInterval": self.alive_s,
            "ServerAliveCountMax": self.silences,
        }
        words = [word for name, value in timeouts.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", *self.further, *self.options, *words, "--", host, remote]


def quote_remote(words: Sequence[str]) -> str:
    """``words`` for the shell of another host, each as it is; but a first ``~/`` is its home."""
    return " ".join(
        "~/" + shlex.quote(word[2:]) if word.startswith("~/") and word[2:] else shlex.quote(word)
        for word in words
    )


@dataclass(frozen=True)
class KnobNames:
    """What mends a refusal of ssh, as a user of the command writes it."""

    hosts: str
    port: str
    python: str


def explain_end(
    host: str, said: Iterable[str], *, code: int | None, knobs: KnobNames, tried: str = ""
) -> ResourceError:
    """Why ssh to ``host`` ended, of the lines that it has ``said`` and its exit code.

    ``tried`` is what a user types to see it.
    """
    lines = [line for line in said if line and not line.startswith(("Warning:", "** "))]
    names: Mapping[str, str] = {
        "host": host.rpartition("@")[2],
        "hosts": knobs.hosts,
        "port": knobs.port,
        "python": knobs.python,
        "tried": tried or f"ssh {host}",
    }
    known = (end[1:] for end in _ENDS if any(end[0] in line for line in lines))
    last = lines[-1] if lines else f"ssh ended with {code}"
    sentence, fix = next(known, (last, "{tried} -v" if tried else "ssh -v {host}"))
    fix = fix.format(**names)
    if tried and tried not in fix:
        fix = f"{fix}; it was tried as: {tried}"
    return ResourceError(f"{host}: {sentence}", fix=fix, host=host)


_ENDS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is another than the one that is known: it was installed anew, or is another",
        "if that is so: ssh-keygen -R {host}",
    ),
    (
        "Host key verification failed",
        "its host key is not known here",
        "compare it: {tried}; or ssh-keyscan {host} >> ~/.ssh/known_hosts",
    ),
    ("Permission denied (", "it lets nobody in with the keys that are here", "ssh-copy-id {host}"),
    (
        "Permission denied",
        "its Python may not be run by this user",
        "name another: {python}",
    ),
    (
        "Too many authentication failures",
        "it was offered too many keys before the right one",
        "name the one that opens it (IdentityFile, and IdentitiesOnly=yes)",
    ),
    (
        "Could not resolve hostname",
        "this name has no address here",
        "getent hosts {host}; correct {hosts}, or add it to /etc/hosts",
    ),
    (
        "Connection refused",
        "nothing listens for ssh there",
        "systemctl start ssh, there; or give its port: {port}",
    ),
    (
        "timed out",
        "no answer: it is down, or a firewall drops what comes to its port of ssh",
        "ping {host}",
    ),
    ("No route to host", "no way leads there: it is down, or in another network", "ping {host}"),
    ("Network is unreachable", "no way leads there: this host has no network to it", "ip route"),
    ("Bad configuration option", "ssh knows no such option", "see man ssh_config"),
    (
        "No module named",
        "Python is there, and torsh_trainer is not",
        "install it there (pip install torsh-trainer), or name another with {python}",
    ),
    (
        "No such file or directory",
        "the Python of this host is not there",
        "name the one that is there: {python}",
    ),
    (
        "not found",
        "the Python of this host is not there",
        "name the one that is there: {python}",
    ),
)
