"""Where a run came from: command, code, packages and machine, as plain values."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

DIFF_BYTES = 256 * 1024
_GIT_TIMEOUT_S = 5.0


def gather_provenance(
    *,
    command: Sequence[str],
    threads: int | None,
    devices: Sequence[str],
    folder: Path,
    now: datetime,
) -> dict[str, Any]:
    """Facts that let somebody repeat a run, or see why it came out differently.

    No environment variable is among them: they hold secrets. ``git`` is null where ``folder`` is in
    no repository.
    """
    return {
        "time": now.isoformat(timespec="seconds"),
        "command": list(command),
        "folder": str(folder),
        "git": git_state(folder),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": installed_packages(sys.path),
        "hardware": {
            "host": platform.node(),
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": _usable_cores(),
            "memory_bytes": _memory_bytes(),
            "devices": list(devices),
        },
        "threads_per_process": threads,
    }


def git_state(folder: Path, *, most_bytes: int = DIFF_BYTES) -> Mapping[str, Any] | None:
    """Commit, and what differs from it, of the repository that ``folder`` is in.

    The diff stops after ``most_bytes``, and ``diff_truncated`` says so; ``untracked`` lists files
    that git does not know and does not ignore. None without git, outside of a repository, and when
    git takes too long.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") or b""
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard") or b""
    names = untracked.decode(errors="replace").splitlines()
    return {
        "commit": commit.decode().strip(),
        "diff": diff[:most_bytes].decode(errors="replace"),
        "diff_truncated": len(diff) > most_bytes,
        "untracked": names[:100],
    }


def installed_packages(path: Sequence[str]) -> dict[str, str]:
    """Name and version of every distribution on ``path`` (``sys.path``), the first of a name.

    The folders' names say both (PEP 376). ``importlib.metadata`` would open every one: 70 ms for
    150 packages instead of 1 ms, at the start of every run.
    """
    packages: dict[str, str] = {}
    for folder in path:
        try:
            names = os.listdir(folder or ".")  # noqa: PTH208 - no Path for each of thousands
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info"):
                package, _, version = name.removesuffix(".dist-info").partition("-")
                packages.setdefault(package.replace("_", "-").lower(), version)
    return dict(sorted(packages.items()))


def _git(folder: Path, *arguments: str) -> bytes | None:
    # --no-optional-locks: a run must not get in the way of the user's own git.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith(("model name", "Model", "Hardware")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
