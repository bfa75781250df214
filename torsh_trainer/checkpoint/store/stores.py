"""How a checkpoint comes to lie in a folder whole or not at all, and how it leaves it again.

On a file system it is written into a hidden folder, synced, and renamed. On an object store nothing
renames: it is written in its place, and the manifest, written last, makes it a checkpoint. Needs no
torch.
"""

from __future__ import annotations

import abc
import contextlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from torsh_trainer.checkpoint.store.integrity import (
    MANIFEST,
    Manifest,
    check_sizes,
    read_manifest,
    write_manifest,
)
from torsh_trainer.checkpoint.store.lock import FileLock, Lock, NoLock, ObjectLock
from torsh_trainer.checkpoint.store.places import RemotePath, StoragePath, Unreachable
from torsh_trainer.checkpoint.store.retention import (
    UNFINISHED,
    Keep,
    candidates,
    find_expired,
    folder_name,
    is_unfinished,
    next_sequence,
)
from torsh_trainer.errors import TorshError
from torsh_trainer.utils.files import sync_folder

log = logging.getLogger("torsh_trainer")

_SAVING = ".saving-"
_REMOVED = ".removed-"


class CheckpointRoom(NamedTuple):
    """Where a checkpoint is written, and what it will be called."""

    writing: StoragePath
    target: StoragePath


class Store(abc.ABC):
    """A folder of checkpoints as the run that saves there sees it; only rank 0 has to do with one.

    ``run`` is the line of saves that it belongs to: what another has saved is never touched. A
    method raises OSError when the disk refuses, and Unreachable when a remote store does.
    """

    poll_s: float
    """How often to look whether other ranks have written their files."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._lock: Lock = NoLock()
        self._swept = False
        self._known: dict[str, Manifest] = {}

    @abc.abstractmethod
    def claim(self) -> None:
        """Holds the folder for this run, until ``release``.

        Raises:
            ConfigError: another run holds it; names the file, the host and the process.
        """

    def release(self) -> None:
        """Gives the folder back, in order: a run that saved nothing has cleared nothing away."""
        try:
            if not isinstance(self._lock, NoLock):
                self._tidy()
        finally:
            lock, self._lock = self._lock, NoLock()
            lock.release()

    @abc.abstractmethod
    def begin(self, step: int) -> CheckpointRoom:
        """Makes room for a checkpoint, and clears away what dead processes left half done."""

    @abc.abstractmethod
    def commit(self, room: CheckpointRoom, manifest: Manifest) -> None:
        """Makes visible what was written into ``room``: it becomes a checkpoint by one act.

        An earlier one of this run and step goes, once the new one is there.
        """

    @abc.abstractmethod
    def discard(self, room: CheckpointRoom) -> None:
        """Removes what was written into ``room``, as far as that is possible."""

    @abc.abstractmethod
    def delete(self, path: StoragePath) -> None:
        """Removes a checkpoint: no part of it is ever taken for one."""

    @abc.abstractmethod
    def clean(self, room: CheckpointRoom) -> None:
        """Removes what ranks left in ``room`` for one another."""

    @property
    @abc.abstractmethod
    def folder(self) -> StoragePath:
        """Where checkpoints go."""

    def _tidy(self) -> None:
        if not self._swept:
            self._sweep()
            self._swept = True

    @abc.abstractmethod
    def _sweep(self) -> None:
        """Removes what dead processes left half written or half deleted."""

    def next_sequence(self) -> int:
        """The number of the next save."""
        return next_sequence(self.folder, self._known)

    def retire(self, keep: Keep) -> None:
        """Deletes what no rule keeps; one that cannot be deleted is only logged."""
        try:
            for one in find_expired(self.folder, run=self.run, keep=keep, known=self._known):
                self.delete(one.path)
                self._known.pop(one.path.name, None)
        except (OSError, Unreachable) as error:
            # The new checkpoint is safe: an old one too many is no reason to stop.
            log.warning("an old checkpoint could not be deleted: %s", error)

    def _is_ours(self, path: StoragePath) -> bool:
        """True for a checkpoint of this run, damaged or not."""
        try:
            return read_manifest(path).run == self.run
        except Unreachable:
            raise
        except TorshError:
            return False

    def _names(self, step: int) -> Iterator[str]:
        return (folder_name(step, attempt) for attempt in count(1))


class LocalStore(Store):
    """Hidden folders, fsync, and a rename."""

    poll_s = 0.05

    def __init__(self, folder: Path, run: str) -> None:
        super().__init__(run)
        self._folder = folder
        self._made = False

    @property
    def folder(self) -> Path:
        return self._folder

    def claim(self) -> None:
        self._made = not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._folder, self.run)

    def release(self) -> None:
        super().release()
        if self._made:
            with contextlib.suppress(OSError):  # unless something lies in it
                self._folder.rmdir()

    def begin(self, step: int) -> CheckpointRoom:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tidy()
        writing = self._hidden_path(_SAVING, folder_name(step))
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        return CheckpointRoom(writing, self._folder / self._name(step))

    def commit(self, room: CheckpointRoom, manifest: Manifest) -> None:
        writing, target = _local(room.writing), _local(room.target)
        write_manifest(writing, manifest)
        sync_folder(writing)
        if not target.exists():
            writing.rename(target)
            sync_folder(self._folder)
            return
        # It is visible under another name before the old one goes: one of them always is.
        beside = self._folder / self._name(manifest.step, free=True)
        writing.rename(beside)
        sync_folder(self._folder)
        replaced = self._hide(target)
        beside.rename(target)
        sync_folder(self._folder)
        self._known.pop(target.name, None)
        log.info("%s was there before and is replaced", target)
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self, room: CheckpointRoom) -> None:
        shutil.rmtree(_local(room.writing), ignore_errors=True)

    def delete(self, path: StoragePath) -> None:
        shutil.rmtree(self._hide(_local(path)))

    def clean(self, room: CheckpointRoom) -> None:
        for marker in _local(room.writing).glob(".part-*"):
            marker.unlink()

    def _name(self, step: int, *, free: bool = False) -> str:
        """The first name that nothing has, or (but with ``free``) a checkpoint of this run."""
        for name in self._names(step):
            path = self._folder / name
            if not path.exists() or (not free and self._is_ours(path)):
                return name
        raise AssertionError("there are enough names")

    def _hidden_path(self, why: str, name: str) -> Path:
        return self._folder / f"{why}{name}-{socket.gethostname()}-{os.getpid()}"

    def _hide(self, path: Path) -> Path:
        """Renames what is to be deleted, so that no part of it is ever taken for a checkpoint."""
        hidden = self._hidden_path(_REMOVED, path.name)
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        return hidden

    def _sweep(self) -> None:
        """Removes what killed processes of this host left half written or half deleted."""
        for path in self._folder.glob(".*"):
            if not path.name.startswith((_SAVING, _REMOVED)) or not path.is_dir():
                continue
            host, _, process = path.name.rpartition("-")
            if host.endswith(f"-{socket.gethostname()}") and not _runs_elsewhere(process):
                shutil.rmtree(path, ignore_errors=True)


class RemoteStore(Store):
    """Objects under their final names; what has no manifest is no checkpoint."""

    poll_s = 1.0

    def __init__(self, folder: RemotePath, run: str, *, take_over: bool) -> None:
        super().__init__(run)
        self._folder = folder
        self._take_over = take_over

    @property
    def folder(self) -> RemotePath:
        return self._folder

    def claim(self) -> None:
        self._lock = ObjectLock(self._folder, self.run, take_over=self._take_over)

    def begin(self, step: int) -> CheckpointRoom:
        self._tidy()
        taken = set(self._folder.listing())
        name = next(name for name in self._names(step) if name not in taken)
        target = self._folder / name
        target.mkdir()
        self._mark(target)
        return CheckpointRoom(target, target)

    def commit(self, room: CheckpointRoom, manifest: Manifest) -> None:
        target = _remote(room.target)
        check_sizes(target, manifest)
        self._lock.check()  # after the files are there, which took the time
        write_manifest(target, manifest)
        (target / UNFINISHED).unlink(missing_ok=True)
        prefix = folder_name(manifest.step)
        for path in candidates(self._folder):
            same_step = path.name == prefix or path.name.startswith(f"{prefix}.")
            if same_step and path != target and self._is_ours(path):
                log.info("%s replaces %s", target, path)
                self.delete(path)
                self._known.pop(path.name, None)

    def discard(self, room: CheckpointRoom) -> None:
        with contextlib.suppress(OSError, Unreachable):  # then the next run sweeps it
            _remote(room.writing).remove(last=UNFINISHED)

    def delete(self, path: StoragePath) -> None:
        path = _remote(path)
        self._mark(path)
        (path / MANIFEST).unlink(missing_ok=True)
        path.remove(last=UNFINISHED)

    def clean(self, room: CheckpointRoom) -> None:
        writing = _remote(room.writing)
        for name in writing.listing():
            if name.startswith(".part-"):
                (writing / name).unlink(missing_ok=True)

    def _mark(self, path: RemotePath) -> None:
        (path / UNFINISHED).write_bytes(json.dumps({"run": self.run}).encode())

    def _sweep(self) -> None:
        """Removes what this run, or one whose process is known to be dead, left unfinished."""
        ours = {self.run, *self._lock.inherited}
        for path in candidates(self._folder):
            if is_unfinished(path) and self._read_unfinished_run(path) in ours:
                log.info("%s was left unfinished, and is removed", path)
                path.remove(last=UNFINISHED)

    def _read_unfinished_run(self, path: RemotePath) -> str | None:
        """The run that left ``path`` unfinished, as far as can be read."""
        try:
            run = json.loads((path / UNFINISHED).read_bytes())["run"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None
        return run if isinstance(run, str) else None


def store_at(folder: StoragePath, run: str, *, take_over: bool = False) -> Store:
    """The store that suits ``folder``."""
    if isinstance(folder, RemotePath):
        return RemoteStore(folder, run, take_over=take_over)
    return LocalStore(folder, run)


def _local(place: StoragePath) -> Path:
    assert isinstance(place, Path), place
    return place


def _remote(place: StoragePath) -> RemotePath:
    assert isinstance(place, RemotePath), place
    return place


def _runs_elsewhere(process: str) -> bool:
    """True when that process id belongs to another living process."""
    if not process.isdigit() or int(process) == os.getpid():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
