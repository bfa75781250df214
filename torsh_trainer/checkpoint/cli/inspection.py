"""Checkpoints looked at from outside: which there are, and whether each is what was written.

Needs no torch: a list of checkpoints is there in milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torsh_trainer.checkpoint.store.integrity import (
    MANIFEST,
    Digest,
    Manifest,
    check_sizes,
    digest,
    read_manifest,
)
from torsh_trainer.checkpoint.store.places import (
    StoragePath,
    Unreachable,
    explain_store_error,
    sizes,
    subfolders,
)
from torsh_trainer.checkpoint.store.retention import candidates, is_name, is_named
from torsh_trainer.checkpoint.store.summing import spare_threads
from torsh_trainer.errors import ConfigError, ResourceError, TorshError, nearest
from torsh_trainer.utils.files import disk_error

Thing = TypeVar("Thing")

_DEPTH = 4  # how far below a folder runs are looked for
_UPGRADE = "upgrade torsh-trainer to the release that saved it"
_NONE_THERE = (
    "give a checkpoint (.../step-00000100), a run directory, or a folder with some below it"
)


@dataclass(frozen=True)
class Look:
    """A checkpoint as its manifest and the sizes of its files say; no content was read.

    ``problem`` says in a few words why it is not whole, and is empty where it is; ``newer`` that a
    newer release wrote it, which is no damage.
    """

    path: StoragePath
    manifest: Manifest | None
    problem: str = ""
    newer: bool = False

    @property
    def size_bytes(self) -> int | None:
        """What its files came to when it was written; None where nobody knows."""
        if self.manifest is None:
            return None
        return sum(file.size_bytes for file in self.manifest.files.values())


@dataclass(frozen=True)
class CheckpointVerdict:
    """A checkpoint after every byte was read: ``damages`` has a phrase for each damaged file.

    ``strangers`` are files beside it that its manifest does not know; they do no harm. Of one that
    a ``newer`` release wrote nothing is known.
    """

    path: StoragePath
    files: int
    size_bytes: int
    damages: Sequence[str] = ()
    strangers: Sequence[str] = ()
    newer: bool = False


def look(path: StoragePath) -> Look:
    """Reads the manifest of the checkpoint at ``path`` and compares sizes.

    Raises:
        Unreachable: a remote store did not answer.
    """
    manifest = _try_manifest(path)
    if isinstance(manifest, TorshError):
        return Look(path, None, _why(manifest, path), newer=isinstance(manifest, ConfigError))
    try:
        check_sizes(path, manifest)
    except Unreachable:
        raise
    except TorshError as error:
        return Look(path, manifest, _why(error, path))
    return Look(path, manifest)


def _looks(path: StoragePath) -> list[Look]:
    return [look(path)]


def gather(
    paths: Iterable[StoragePath], *, unread: dict[StoragePath, TorshError] | None = None
) -> dict[StoragePath, list[Look]]:
    """Folder -> its checkpoints by step, for each of ``paths`` and what lies below it.

    A path may be a checkpoint, a run directory, its checkpoints folder, or a folder with some
    below it (a sweep). With ``unread`` what cannot be looked at is noted there, and the rest goes
    on without it.

    Raises:
        ConfigError: one of them is not there, or holds no checkpoint.
        OSError: the disk refused.
        Unreachable: a remote store did not answer.
    """
    folders: dict[StoragePath, dict[StoragePath, Look]] = {}
    for path in paths:
        for found in _note_failure(partial(_checkpoints, path, unread), path, unread):
            for one in _note_failure(partial(_looks, found), found, unread):
                folders.setdefault(found.parent, {}).setdefault(found, one)
    return {folder: list(looks.values()) for folder, looks in folders.items()}


def _note_failure(
    work: Callable[[], list[Thing]],
    place: StoragePath,
    unread: dict[StoragePath, TorshError] | None,
) -> list[Thing]:
    """What ``work`` finds at ``place``; nothing, and a note in ``unread``, where it fails."""
    try:
        return work()
    except (OSError, TorshError) as error:
        if unread is None:
            raise
        unread[place] = (
            error
            if isinstance(error, TorshError)
            else disk_error(error, "read", Path(os.fsdecode(error.filename or str(place))))
        )
        return []


def newest(looks: Iterable[Look]) -> Look | None:
    """The one that was saved last, of those that are whole."""
    whole = [one for one in looks if not one.problem and one.manifest is not None]
    return max(whole, key=_sequence, default=None)


def choose(path: StoragePath) -> tuple[StoragePath, list[Look]]:
    """The checkpoint that ``path`` means: itself, or the newest whole one of a run.

    Returns it, and what is not whole and may be newer.

    Raises:
        ConfigError: nothing is there, no checkpoint is, several runs are, or a newer release
            wrote it.
        ResourceError: it is damaged, as far as sizes tell.
    """
    folders = gather([path])
    if len(folders) > 1:
        names = ", ".join(str(folder.parent) for folder in list(folders)[:3])
        raise ConfigError(
            f"{path} holds the checkpoints of {len(folders)} runs: {names}"
            + (", ..." if len(folders) > 3 else ""),
            fix="name one of them",
        )
    (looks,) = folders.values()
    found = newest(looks)
    if found is None:
        worst = max(looks, key=_sequence)
        if worst.newer:
            raise ConfigError(f"the checkpoint {worst.path} {worst.problem}", fix=_UPGRADE)
        raise ResourceError(
            f"the checkpoint {worst.path} cannot be used: {worst.problem}",
            fix="name another, or copy this one again",
            path=str(worst.path),
        )
    last = _sequence(found)
    return found.path, [
        one for one in looks if one.problem and (one.manifest is None or _sequence(one) > last)
    ]


def examine(path: StoragePath) -> CheckpointVerdict:
    """Reads every file of the checkpoint at ``path`` and compares it with its manifest.

    Raises:
        Unreachable: a remote store did not answer.
    """
    manifest = _try_manifest(path)
    if isinstance(manifest, TorshError):
        newer = isinstance(manifest, ConfigError)
        return CheckpointVerdict(path, 0, 0, [_why(manifest, path)], newer=newer)
    try:
        there = sizes(path)
    except OSError as error:
        return CheckpointVerdict(path, 0, 0, [f"it cannot be read ({error.strerror})"])
    damages = [
        phrase
        for name, file in manifest.files.items()
        if (phrase := _damage(path / name, there.get(name), file))
    ]
    strangers = sorted(there.keys() - {MANIFEST, *manifest.files})
    size = sum(file.size_bytes for file in manifest.files.values())
    return CheckpointVerdict(path, len(manifest.files), size, damages, strangers)


def _damage(path: StoragePath, size: int | None, written: Digest) -> str:
    if size is None:
        return f"{path.name} is missing"
    if size != written.size_bytes:
        return f"{path.name} has {size} bytes, and {written.size_bytes} were written"
    try:
        found = digest(path, threads=spare_threads(1))
    except Exception as error:  # every library of a store has errors of its own
        if isinstance(path, Path) and isinstance(error, OSError):
            return f"{path.name} cannot be read ({error.strerror})"
        raise explain_store_error(error, "read", path, rank=0) from error
    if found != written:
        return (
            f"{path.name} is not what was written "
            f"(CRC-32 {found.crc32}, and it was {written.crc32})"
        )
    return ""


def _checkpoints(
    path: StoragePath, unread: dict[StoragePath, TorshError] | None
) -> list[StoragePath]:
    if not path.exists():
        near = isinstance(path, Path) and path.parent.is_dir()
        offer = nearest(path.name, [other.name for other in path.parent.iterdir()] if near else [])
        raise ConfigError(
            f"{path} is not there", fix=offer if offer.startswith("did you mean") else _NONE_THERE
        )
    if not path.is_dir():
        raise ConfigError(
            f"{path} is a file, and a checkpoint is a folder",
            fix="`checkpoint import` reads files of other formats",
        )
    if is_named(path) or (path / MANIFEST).exists():
        return [path]
    found: list[StoragePath] = []
    known = 0 if unread is None else len(unread)
    for folder in _folders(path, _DEPTH, unread):
        found += _note_failure(partial(candidates, folder), folder, unread)
    if not found and (unread is None or len(unread) == known):
        raise ConfigError(f"no checkpoint in {path}", fix=_NONE_THERE)
    return found


def _folders(
    path: StoragePath, depth: int, unread: dict[StoragePath, TorshError] | None
) -> Iterator[StoragePath]:
    """``path`` and what lies below it, but for checkpoints and what is hidden."""
    yield path
    if depth == 0:
        return
    for below in sorted(_note_failure(partial(subfolders, path), path, unread), key=str):
        if not below.name.startswith(".") and not is_name(below.name):
            yield from _folders(below, depth - 1, unread)


def _sequence(one: Look) -> int:
    return one.manifest.sequence if one.manifest else 0


def _try_manifest(path: StoragePath) -> Manifest | TorshError:
    """The manifest, or the error that says why there is none."""
    try:
        return read_manifest(path)
    except Unreachable:
        raise
    except TorshError as error:
        return error


def _why(error: TorshError, path: StoragePath) -> str:
    """The reason alone: the reader sees the path beside it."""
    return str(error.facts.get("why", error.sentence.removeprefix(f"{path} ")))
