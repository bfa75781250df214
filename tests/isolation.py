"""Hosts of their own in namespaces, for whatever crosses machines; a clock and locks that lie."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
LAB = Path(__file__).with_name("lab.sh")
TIMEOUT_S = 120
_NOT_OF_A_JOB = "# not of a job"

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
    programs = (
        "unshare",
        "nsenter",
        "ip",
        "iptables",
        "gcc",
        "ssh",
        "ssh-keygen",
        "sshd",
        "setpriv",
    )
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


class Sshd:
    """A server of ssh on the loopback, for this user alone; ``config`` is a client's."""

    def __init__(self, folder: Path) -> None:
        assert Path("/usr/sbin/sshd").exists(), "install what .ci/run lists: openssh-server"
        self.config = folder / "ssh_config"
        for name in ("host_key", "user_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}\n")
        (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
        (folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nStrictModes no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPidFile none\nUsePAM no\n"
            "MaxStartups 50\n"
        )
        self.config.write_text(
            f"Port {port}\nIdentityFile {folder}/user_key\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {folder}/known_hosts\nStrictHostKeyChecking yes\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")],
            stderr=subprocess.DEVNULL,
        )
        _wait_until(lambda: _listens("127.0.0.1", port))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Lab:
    """Hosts of ``lab.sh`` that stay; what is started ``at_head`` sees them by name."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.ssh_config = folder / "ssh_config"
        ready = folder / "ready"
        script = f"touch {ready}; exec cat"  # it ends with its input: this process is gone
        self._process = subprocess.Popen(
            [LAB, folder, str(count), "bash", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _wait_until(ready.exists)
        self._head = _child_of(self._process.pid)

    def close(self) -> None:
        """Ends all that runs in it."""
        os.kill(self._head, signal.SIGKILL)
        self._process.communicate()

    def at_head(self, words: Sequence[str], **options: Any) -> LabProcess:
        """Starts a command on the host from which a user starts jobs."""
        return LabProcess([*self._enter(self._head), *map(str, words)], **options)

    def run_at_head(self, *words: str) -> None:
        """Runs a command there to its end."""
        subprocess.run([*self._enter(self._head), *words], check=True, capture_output=True)

    def run_on(self, host: str, *words: str) -> None:
        """Runs a command on a host to its end."""
        subprocess.run([*self._enter(self.first_of(host)), *words], check=True, capture_output=True)

    @contextlib.contextmanager
    def beside(self, host: str, script: str) -> Iterator[None]:
        """A Python script that runs on a host, and is not of a job."""
        words = [sys.executable, "-c", f"{script}  {_NOT_OF_A_JOB}"]
        process = subprocess.Popen([*self._enter(self.first_of(host)), *words])
        try:
            yield
        finally:
            os.kill(_child_of(process.pid), signal.SIGKILL)
            process.wait()

    def first_of(self, host: str) -> int:
        """Process 1 of a host, as the test counts."""
        wanted = [(self.folder / f"pid-{host}").read_text().strip(), "1"]
        below = [self._head]
        while below:
            pid = below.pop()
            if _status_line(Path(f"/proc/{pid}/status"), "NSpid:")[-2:] == wanted:
                return pid
            below += _children_of(pid)
        raise AssertionError(f"{host} is gone")

    def programs_on(self, host: str) -> dict[int, str]:
        """What runs on a host beside its server of ssh: number, as the test counts -> command."""
        try:
            home = Path(f"/proc/{self.first_of(host)}/ns/pid").readlink()
        except (OSError, AssertionError):
            return {}
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "ns/pid").readlink() != home:
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            ours = command.startswith(("sshd", "/usr/sbin/sshd")) or _NOT_OF_A_JOB in command
            if command and not ours:
                found[int(entry.name)] = command
        return found

    def await_empty(self, *hosts: str, of: str = "") -> None:
        """Returns once nothing of a job runs on hosts, or nothing with ``of`` in its command."""
        _wait_until(
            lambda: not any(of in c for host in hosts for c in self.programs_on(host).values())
        )

    @staticmethod
    def _enter(pid: int) -> list[str]:
        return ["nsenter", "-t", str(pid), "--all", f"--wd={Path.cwd()}", "--"]


class LabProcess:
    """A command in the lab; signals reach itself, not what brought it there."""

    def __init__(self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        self._folder = cwd
        at = words.index("--")
        words = [*words[: at - 1], f"--wd={cwd}", *words[at:]]
        self._process = subprocess.Popen(
            list(words),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def _status(self) -> Path:
        return Path(f"/proc/{self._process.pid}/status")

    @property
    def pid(self) -> int:
        """Its number, as the test counts."""
        _wait_until(lambda: _children_of(self._process.pid) or self._process.poll() is not None)
        return _child_of(self._process.pid)

    def end(self, timeout_s: float = 240) -> tuple[int, str, str]:
        """Its exit code and both outputs."""
        out, err = self._process.communicate(timeout=timeout_s)
        return self._process.returncode, out, err

    def stop(self) -> None:
        """Stops it as Ctrl-Z does."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Has it go on; what brought it here has stopped with it, and resumes it."""
        _wait_until(lambda: _status_line(self._status, "State:")[0] in "tT")
        os.kill(self._process.pid, signal.SIGCONT)

    def is_running(self) -> bool:
        return self._process.poll() is None


def _children_of(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _child_of(pid: int) -> int:
    _wait_until(lambda: bool(_children_of(pid)))
    return _children_of(pid)[0]


def _status_line(file: Path, name: str) -> list[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    return next((line.split()[1:] for line in lines if line.startswith(name)), [])


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port)).close()
    except OSError:
        return False
    return True


def _wait_until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end_s, "it never came to it"
        time.sleep(0.02)
