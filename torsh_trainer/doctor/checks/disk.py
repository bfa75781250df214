"""Where runs and checkpoints go: room, rights, locks, and whether other hosts see it."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from pathlib import Path
from shlex import quote

from torsh_trainer.doctor.base import Check, CheckResult, pass_check, report_finding, skip_check
from torsh_trainer.doctor.checks.memory import say_bytes
from torsh_trainer.doctor.machine import Machine, wait_for

_LEAST_FREE = 2 * 2**30
_LEAST_FREE_TEMPORARY = 256 * 2**20
_LEAST_INODES = 1000
_MOST_SKEW_S = 2.0
_SLOW_S = 5.0
_LOCAL = frozenset(
    [
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "reiserfs",
        "jfs",
        "overlay",
        "tmpfs",
        "ramfs",
        "devtmpfs",
        "vfat",
        "ntfs",
    ]
)
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "HF_HOME")
_FOLDER = "give another folder with --dir, and to the run with hydra.run.dir"


class DiskSpace(Check):
    """The disk of the run directory has room for checkpoints."""

    why = (
        "a save that does not fit fails, and with it hours of training; a file system may also "
        "run out of names (inodes) while it has bytes"
    )

    def look(self, machine: Machine) -> CheckResult:
        folder = find_parent(machine.folder)
        found = os.statvfs(folder)
        free = found.f_bavail * found.f_frsize
        saw = f"{say_bytes(free)} free at {folder}"
        if free < _LEAST_FREE:
            return report_finding(saw, fix=f"df -h {quote(str(folder))}; free some, or {_FOLDER}")
        if found.f_files and found.f_favail < _LEAST_INODES:
            return report_finding(
                f"{saw}, but room for {found.f_favail} more files",
                fix=f"df -i {quote(str(folder))}; delete small files, or {_FOLDER}",
            )
        return pass_check(saw)


class RunDirectory(Check):
    """Files can be written where runs go."""

    why = (
        "a read-only mount, or a server that takes root for nobody (root_squash), refuses the "
        "first file of the run, after the queue has been waited for"
    )

    def look(self, machine: Machine) -> CheckResult:
        folder = find_parent(machine.folder)
        started = time.monotonic()
        done = wait_for(lambda: _try_writing(folder), timeout_s=_SLOW_S)
        took = time.monotonic() - started
        if done is None:
            return report_finding(
                f"writing to {folder} takes longer than {_SLOW_S:g} s",
                fix=f"stat -f {quote(str(folder))}; the server of the file system hangs: {_FOLDER}",
            )
        error, owner = done
        if error is None:
            squashed = owner != os.geteuid()
            note = f", as user {owner}: the server maps users (root_squash)" if squashed else ""
            return pass_check(f"{folder}: written in {took * 1000:.0f} ms{note}")
        saw = f"{folder}: {error.strerror}"
        if error.errno == errno.EROFS:
            return report_finding(
                saw, fix=f"mount -o remount,rw {_mount_of(machine, folder)[0]}, or {_FOLDER}"
            )
        if os.geteuid() == 0 and error.errno in (errno.EACCES, errno.EPERM):
            return report_finding(
                f"{saw}, for root: the server takes root for nobody (root_squash)",
                fix="start as the user that owns the folder: sudo -u USER ...",
            )
        return report_finding(saw, fix=f"ls -ld {quote(str(folder))}; chown it, or {_FOLDER}")


class RunDirectoryShared(Check):
    """With several hosts: the run directory lies on a file system that all of them see."""

    why = (
        "ranks of another host find no checkpoint in a folder of this host's own disk, and a "
        "checkpoint in pieces stays in pieces, one host each"
    )

    def look(self, machine: Machine) -> CheckResult:
        folder = find_parent(machine.folder)
        mount, kind = _mount_of(machine, folder)
        saw = f"{folder} lies on {kind} ({mount})"
        if kind in _LOCAL and machine.job_nodes > 1:
            return report_finding(
                f"{saw}, a disk of this host alone, and the job has {machine.job_nodes} hosts",
                fix=f"df -T; {_FOLDER}: one on NFS, Lustre or the like",
            )
        return pass_check(saw)


class FileLocks(Check):
    """Files of the run directory can be locked."""

    why = (
        "a lock keeps two runs out of one folder: without it (NFS without its lock service) a "
        "start hangs, or ends in 'No locks available'"
    )

    def look(self, machine: Machine) -> CheckResult:
        folder = find_parent(machine.folder)
        error = wait_for(lambda: _try_locking(folder), timeout_s=_SLOW_S)
        if error == "":
            return pass_check(f"{folder}: locked and released")
        if error is not None and error.startswith("cannot write"):
            return skip_check(error)
        said = error or f"a lock takes longer than {_SLOW_S:g} s"
        return report_finding(
            f"{folder}: {said}",
            fix=f"systemctl start rpc-statd (NFS 3), or mount -o flock (Lustre), or {_FOLDER}",
        )


class FileClock(Check):
    """The clock of the run directory's file system is this host's."""

    why = (
        "what compares times of files (caches of compiled kernels, make, newest checkpoint) takes "
        "an old file for new where the server's clock differs"
    )

    def look(self, machine: Machine) -> CheckResult:
        folder = find_parent(machine.folder)
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".torsh-doctor-") as file:
                before = time.time()
                os.utime(file.name)  # the server's own time
                skew = Path(file.name).stat().st_mtime - before
        except OSError as error:
            return skip_check(f"cannot write to {folder}: {error.strerror}")
        saw = f"{folder}: {skew:+.2f} s beside this host's clock"
        if abs(skew) > _MOST_SKEW_S:
            return report_finding(saw, fix="chronyc makestep, here and on the file server")
        return pass_check(saw)


class TemporaryFolder(Check):
    """The folder of temporary files can be written, and has room."""

    why = (
        "sockets between loader workers, compilers and downloads use it: a full one fails "
        "far from its cause, and a path longer than 80 characters is no socket's name"
    )

    def look(self, machine: Machine) -> CheckResult:
        named = next((machine.env[n] for n in ("TMPDIR", "TEMP", "TMP") if machine.env.get(n)), "")
        folder = Path(named or "/tmp")
        fix = "export TMPDIR=FOLDER, one that can be written and has room"
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix="torsh-doctor-") as file:
                os.posix_fallocate(file.fileno(), 0, 2**20)
            found = os.statvfs(folder)
        except OSError as error:
            return report_finding(f"{folder}: {error.strerror}", fix=fix)
        free = found.f_bavail * found.f_frsize
        saw = f"{folder}: {say_bytes(free)} free"
        if len(str(folder)) > 80:
            return report_finding(f"{folder}: its path has {len(str(folder))} characters", fix=fix)
        if free < _LEAST_FREE_TEMPORARY:
            return report_finding(saw, fix=f"df -h {quote(str(folder))}; {fix}")
        return pass_check(saw)


class CacheFolders(Check):
    """Folders of caches (home, and those that variables name) can be written."""

    why = (
        "downloads of models and compiled kernels are kept there: without it each process does "
        "the work again, or fails with 'Permission denied' at the first use"
    )

    def look(self, machine: Machine) -> CheckResult:
        home = machine.env.get("HOME", "")
        base = machine.env.get("XDG_CACHE_HOME") or f"{home}/.cache"
        named = {"XDG_CACHE_HOME": base, **{n: machine.env[n] for n in _CACHES if n in machine.env}}
        for name, text in named.items():
            folder = find_parent(Path(text))
            if not os.access(folder, os.W_OK):
                return report_finding(
                    f"{text} cannot be written (user {os.geteuid()})",
                    fix=f"export {name}=FOLDER, one that this user may write",
                )
        return pass_check(", ".join(named.values()))


def find_parent(folder: Path) -> Path:
    """The folder, or the nearest above it that exists already."""
    at = folder.absolute()
    while not at.is_dir() and at != at.parent:
        at = at.parent
    return at


def _try_writing(folder: Path) -> tuple[OSError | None, int]:
    """(what was refused, the owner that a file gets)."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".torsh-doctor-") as file:
            file.write(b"doctor")
            file.flush()
            os.fsync(file.fileno())
            return None, os.fstat(file.fileno()).st_uid
    except OSError as error:
        return error, -1


def _try_locking(folder: Path) -> str:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".torsh-doctor-") as file:
            return _lock(file.fileno())
    except OSError as error:
        return f"cannot write to {folder}: {error.strerror}"


def _lock(descriptor: int) -> str:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _mount_of(machine: Machine, folder: Path) -> tuple[str, str]:
    """The mount point of a folder, and the kind of its file system."""
    best = ("/", "an unknown file system")
    path = folder.resolve()
    for line in (machine.read("/proc/self/mountinfo") or "").splitlines():
        words = line.split()
        at = words[4].replace("\\040", " ")
        holds = at == "/" or path == Path(at) or Path(at) in path.parents
        if holds and len(at) >= len(best[0]):
            best = (at, words[words.index("-") + 1])
    return best
