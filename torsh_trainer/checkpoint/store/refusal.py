"""What a user needs to know when a disk has refused a checkpoint. Needs no torch."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from torsh_trainer.checkpoint.store.places import StoragePath
from torsh_trainer.checkpoint.store.retention import complete, newest_first
from torsh_trainer.errors import TorshError

_FEW_FILES = 256
"""A disk that says it is full, has room, and this few inodes left, lacks inodes."""


def add_advice(error: TorshError, folder: StoragePath, *, size_bytes: int) -> TorshError:
    """A disk's refusal, with what a checkpoint takes, what is free, and where to go on from.

    ``size_bytes`` is what the tensors of a checkpoint take in all. Any other error, and one of a
    remote store, comes back as it is.
    """
    number = error.facts.get("errno")
    if number is None or not isinstance(folder, Path):
        return error
    sentence, fix, facts = error.sentence, error.fix, dict(error.facts)
    with contextlib.suppress(OSError):  # a disk that is gone cannot be asked
        if number == errno.ENOSPC:
            words, free_bytes = _room(folder, size_bytes)
            sentence += words
            facts |= {"size_bytes": size_bytes, "free_bytes": free_bytes}
        for newest in newest_first(complete(folder))[:1]:
            fix += f"; {newest.path.name} is whole: checkpoint.resume={newest.path} goes on from it"
    told = type(error)(sentence, fix=fix, **facts)
    told.__cause__ = error.__cause__
    return told


def _room(folder: Path, size_bytes: int) -> tuple[str, int]:
    """What a full disk lacks, in words, and the bytes that are free."""
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < size_bytes:
        return f": it takes {_size(size_bytes)}, and {_size(free_bytes)} are free", free_bytes
    if disk.f_files and disk.f_favail < _FEW_FILES:
        return f": there is room, but for {disk.f_favail} more files (inodes)", free_bytes
    return f": without it {_size(free_bytes)} are free", free_bytes


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.1f} GiB"
