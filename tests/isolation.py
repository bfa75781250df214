"""Hosts of their own in namespaces, for whatever crosses machines; a clock and locks that lie."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
LAB = Path(__file__).with_name("lab.sh")
TIMEOUT_S = 120

LIES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { const char *s = getenv("LIE_SECONDS"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += shift();
    return code;
}
int flock(int fd, int how) {
    static int (*real)(int, int);
    if (!real) real = dlsym(RTLD_NEXT, "flock");
    if (getenv("LIE_NO_LOCKS")) { errno = ENOLCK; return -1; }
    return real(fd, how);
}
"""


def require_isolation() -> None:
    """Fails where root has no namespaces, or no programs for them .

    Whoever is not root cannot have them, and skips: continuous integration is root.
    """
    if os.geteuid() != 0:
        pytest.skip("namespaces want root")
    programs = ("unshare", "ip", "iptables", "gcc", "ssh", "ssh-keygen", "sshd", "setpriv")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in programs if not shutil.which(name, path=path)]
    assert not missing, f"install what .ci/run lists: {', '.join(missing)} missing"
    _try_namespaces()


@cache
def _try_namespaces() -> None:
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "ip", "link", "add", "a0", "type", "veth"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"no namespaces: {done.stderr.strip()}"


def doctor(*words: str) -> str:
    """The doctor's command line, for a shell."""
    return shlex.join([sys.executable, "-m", "torsh_trainer", "doctor", *words])


def run_isolated(folder: Path, script: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Runs a shell script as root of namespaces of its own; it is to leave files in ``folder``."""
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "bash", "-euc", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY))},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def in_lab(folder: Path, count: int, script: str, *, timeout_s: float = 300) -> str:
    """Runs a script beside so many hosts (``lab.sh``); what it prints."""
    done = subprocess.run(
        [LAB, folder, str(count), "bash", "-euc", script],
        env={
            **os.environ,
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def read_checks(file: Path) -> dict[str, dict[str, Any]]:
    """Name -> what the check saw, of a file that ``doctor --json`` has written."""
    return {row["name"]: row for row in json.loads(file.read_text())["checks"]}


def build_lies(folder: Path) -> Path:
    """A library that shifts the clock (LIE_SECONDS) or refuses locks (LIE_NO_LOCKS)."""
    source, library = folder / "lies.c", folder / "lies.so"
    source.write_text(LIES)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, capture_output=True
    )
    return library
