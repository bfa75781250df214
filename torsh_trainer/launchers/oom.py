"""What the kernel says of processes that it has killed because memory ran out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_USE = "use fewer processes or a smaller data.batch_size"
_GUESS = f"when nobody killed it by hand, memory ran out (see dmesg): {_USE}"
_NOBODY = (
    "the kernel has killed nobody for memory since: somebody else sent it (kill -9, a limit of the "
    "scheduler, systemd-oomd)"
)
_LARGEST = 2**60
"""What version 1 of control groups says for no limit is larger."""


@dataclass(frozen=True)
class OomKills:
    """How many processes the kernel had killed for memory when this was made.

    ``group`` are those of this process's control group, ``machine`` those of the whole machine;
    None where the kernel does not say.
    """

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    group: int | None = field(init=False)
    machine: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", self._of_group())
        object.__setattr__(self, "machine", _count(self.proc / "vmstat"))

    def since(self) -> str:
        """Why a process that SIGKILL has ended since was killed, as far as the kernel tells."""
        now = OomKills(self.proc, self.cgroups)
        in_group = _difference(self.group, now.group)
        if in_group:
            return (
                "the kernel killed it, or another of its control group, because memory ran out"
                f"{self._limit()}: {_USE}"
            )
        on_machine = _difference(self.machine, now.machine)
        if on_machine:
            return (
                "the kernel has killed a process of this machine since, because memory ran out "
                f"(see dmesg for which): {_USE}"
            )
        return _GUESS if on_machine is None else _NOBODY

    def _of_group(self) -> int | None:
        for folder in self._folders():
            for name in ("memory.events", "memory.oom_control"):
                count = _count(folder / name)
                if count is not None:
                    return count
        return None

    def _limit(self) -> str:
        for folder in self._folders():
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _text(folder / name).strip()
                if text.isdecimal() and int(text) < _LARGEST:
                    return f" (its limit is {int(text) / 2**30:.1f} GiB)"
        return ""

    def _folders(self) -> Iterator[Path]:
        """Where the control group of this process may be found, in versions 2 and 1.

        A container may see its own group as the root of all.
        """
        for line in _text(self.proc / "self" / "cgroup").splitlines():
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            root = {"": self.cgroups, "memory": self.cgroups / "memory"}.get(controllers)
            if root is not None:
                yield from (root / path.lstrip("/"), root)


def _difference(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else now - before


def _count(file: Path) -> int | None:
    for line in _text(file).splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdecimal():
            return int(number)
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
