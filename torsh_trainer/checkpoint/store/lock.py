"""One run at a time saves into a folder: who holds it, and whether that process still lives.

On a file system the kernel keeps the lock (flock) and drops it when the process ends, however that
happens. An object store has no such thing: there the lock is an object that names its holder. Needs
no torch.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from torsh_trainer.checkpoint.store.places import RemotePath
from torsh_trainer.errors import ConfigError

log = logging.getLogger("torsh_trainer")

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_held: set[int] = set()
"""Descriptors of locks of this process. A child must not keep them: it may outlive us."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder; ``began`` tells it from a later one of the same number.

    ``runs`` are the lines of saves that it may have left something of.
    """

    host: str
    pid: int
    began: str
    since: str
    token: str
    runs: tuple[str, ...] = ()

    @classmethod
    def me(cls, run: str) -> Holder:
        """This process, on behalf of ``run``."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _began(pid), now, uuid.uuid4().hex, (run,))

    @classmethod
    def read(cls, content: bytes) -> Holder | None:
        """The holder that a lock file names; None when nothing sensible stands there."""
        try:
            said = json.loads(content)
            return cls(**{**said, "runs": tuple(said["runs"])})
        except (ValueError, TypeError, KeyError):
            return None

    def as_bytes(self) -> bytes:
        """What stands in the lock file."""
        return (json.dumps(asdict(self)) + "\n").encode()

    @property
    def is_here(self) -> bool:
        """True for a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """True when the process still runs; only to be asked of one that ``is_here``."""
        return _began(self.pid) == self.began

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class Lock(abc.ABC):
    """A folder held for one run; ``inherited`` are runs whose holder is known to be dead."""

    inherited: tuple[str, ...] = ()

    @abc.abstractmethod
    def check(self) -> None:
        """Makes sure that the folder is still ours.

        Raises:
            ConfigError: somebody else has taken it.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Gives the folder back; a second time does nothing."""


class FileLock(Lock):
    """A lock that the kernel keeps on a file in ``folder``, which must be there.

    Raises:
        ConfigError: another process holds it; names the file, the host and the process.
        OSError: the disk refused.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._path = folder / LOCK
        self._descriptor = -1
        while self._descriptor < 0:
            self._descriptor = self._open(folder)
        try:
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, Holder.me(run).as_bytes())
        except OSError:
            self.release()
            raise

    def check(self) -> None:
        """Nobody can take it while this process lives."""

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor in _held:
            _held.discard(descriptor)
            with contextlib.suppress(OSError):  # a file that stays locks nothing
                self._path.unlink(missing_ok=True)  # while it is locked: see _open
            os.close(descriptor)

    def _open(self, folder: Path) -> int:
        """The locked file; -1 when it was removed meanwhile, and so locks nothing."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(self._path.stat(), os.fstat(descriptor)):
                    _held.add(descriptor)
                    return descriptor
        except BlockingIOError:
            holder = Holder.read(os.pread(descriptor, 1 << 16, 0))
            os.close(descriptor)
            raise _lock_error(self._path, holder, folder) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            log.warning("%s has no locks: a second run in it will not be noticed", folder)
            _held.add(descriptor)
            return descriptor
        os.close(descriptor)
        return -1


def check_free(folder: Path) -> None:
    """Makes sure that no run holds ``folder`` at this moment; changes nothing, and holds nothing.

    Raises:
        ConfigError: another process holds it; names the file, the host and the process.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _lock_error(path, Holder.read(os.pread(descriptor, 1 << 16, 0)), folder) from None
    except OSError:
        return  # there are no locks here
    finally:
        os.close(descriptor)


class ObjectLock(Lock):
    """A lock that is an object in ``folder``, naming its holder.

    A holder on this host that no longer lives has left it behind, and it is taken over. Of a holder
    on another host nobody here knows whether it lives: ``take_over`` says that it does not.

    Raises:
        ConfigError: another process holds it; names the object, the host and the process.
        Unreachable: the store did not answer, or refused.
    """

    def __init__(self, folder: RemotePath, run: str, *, take_over: bool) -> None:
        self._path = folder / LOCK
        self._me = Holder.me(run)
        self._folder = folder
        folder.mkdir()
        try:
            self._path.create(self._me.as_bytes())
        except FileExistsError:
            self._take(take_over=take_over)
        _objects.add(self._me.token)

    def check(self) -> None:
        holder = self._holder()
        if holder is None or holder.token != self._me.token:
            raise ConfigError(
                f"{self._path} is no longer this run's: "
                + (f"{holder} has taken {self._folder} over" if holder else "it is gone"),
                fix="stop one of the two runs, and point its checkpoint.dir elsewhere",
                path=str(self._path),
            )

    def release(self) -> None:
        if self._me.token in _objects:
            _objects.discard(self._me.token)
            holder = self._holder()
            if holder is not None and holder.token == self._me.token:
                self._path.unlink(missing_ok=True)

    def _take(self, *, take_over: bool) -> None:
        """Takes the place of a holder that is dead, and its unfinished business.

        Two that do so at one moment are told apart by ``check`` before either publishes.
        """
        holder = self._holder()
        if holder is not None:
            lives = holder.token in _objects or (holder.is_alive if holder.is_here else True)
            ours_to_take = not lives or (take_over and not holder.is_here)
            if not ours_to_take:
                raise _lock_error(self._path, holder, self._folder)
            log.warning("%s was left behind by %s, and is taken over", self._path, holder)
            self.inherited = holder.runs
        self._me = replace(self._me, runs=_unique((*self._me.runs, *self.inherited)))
        self._path.write_bytes(self._me.as_bytes())

    def _holder(self) -> Holder | None:
        try:
            return Holder.read(self._path.read_bytes())
        except FileNotFoundError:
            return None


class NoLock(Lock):
    """What holds a folder that nobody has claimed."""

    def check(self) -> None:
        """There is nothing to lose."""

    def release(self) -> None:
        """There is nothing to give back."""


_objects: set[str] = set()
"""Tokens of the object locks that this process holds."""


def _lock_error(
    lock: Path | RemotePath, holder: Holder | None, folder: Path | RemotePath
) -> ConfigError:
    who = str(holder) if holder else "another process"
    facts = {} if holder is None else {"host": holder.host, "pid": holder.pid}
    elsewhere = "point checkpoint.dir (or hydra.run.dir) elsewhere"
    fix = f"wait for that run or stop it, or {elsewhere}"
    if isinstance(lock, RemotePath) and holder is not None and not holder.is_here:
        fix = (
            f"if that run has ended without giving it back, set checkpoint.take_over=true or "
            f"delete {lock}; if it lives, {elsewhere}"
        )
    return ConfigError(
        f"another run saves into {folder}: {lock} is held by {who}",
        fix=fix,
        path=str(lock),
        **facts,
    )


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _began(pid: int) -> str:
    """When a process began, in the kernel's own words; empty when there is none.

    Where the kernel does not tell (no Linux), all that is known is that it lives.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "" if Path("/proc/self").exists() or not _runs(pid) else "at some time"
    # The name of the program, in brackets, may hold anything.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else f"{boot} {fields[19]}"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _let_go() -> None:
    """In a forked child: its copies would keep the locks after this process is gone."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()
    _objects.clear()


os.register_at_fork(after_in_child=_let_go)
