"""Which checkpoints lie in a folder, which is the newest, and which may go.

Needs no torch.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torsh_trainer.checkpoint.integrity import Manifest, check_sizes, read_manifest
from torsh_trainer.errors import TorshError

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_SAVING = ".saving-"
_REMOVED = ".removed-"


class Found(NamedTuple):
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


def folder_name(step: int) -> str:
    """``step-00000100``: eight digits, so that names sort as steps do."""
    return f"step-{step:08d}"


def is_named(path: Path) -> bool:
    """True for a folder that is called like a checkpoint."""
    return bool(_NAME.fullmatch(path.name)) and path.is_dir()


def candidates(folder: Path) -> list[Path]:
    """Folders that are called like a checkpoint, by step."""
    if not folder.is_dir():
        return []
    return sorted(
        filter(is_named, folder.iterdir()), key=lambda path: int(path.name.removeprefix("step-"))
    )


def recorded(folder: Path) -> list[Found]:
    """The checkpoints in ``folder`` whose manifest can be read, by step."""
    found = []
    for path in candidates(folder):
        try:
            found.append(Found(path, read_manifest(path)))
        except TorshError as error:
            log.debug("passed over %s: %s", path, error.sentence)
    return found


def complete(folder: Path) -> list[Found]:
    """The checkpoints in ``folder`` whose files are all there in full size, by step."""
    found = []
    for one in recorded(folder):
        try:
            check_sizes(one.path, one.manifest)
        except TorshError as error:
            log.debug("passed over %s: %s", one.path, error.sentence)
        else:
            found.append(one)
    return found


def newest_first(found: Iterable[Found]) -> list[Found]:
    """By the order of saving: a run that went back to an older step saves newer checkpoints."""
    return sorted(found, key=lambda one: one.manifest.sequence, reverse=True)


def next_sequence(folder: Path) -> int:
    """The number of the next save into ``folder``."""
    return 1 + max((one.manifest.sequence for one in recorded(folder)), default=0)


def expired(folder: Path, *, run: str, keep_last: int) -> list[Path]:
    """What goes when ``keep_last`` checkpoints of ``run`` stay, oldest first.

    Checkpoints of other runs, incomplete ones and anything else in the folder are not ours to
    delete.
    """
    ours = [one for one in complete(folder) if one.manifest.run == run]
    return [one.path for one in reversed(newest_first(ours)[keep_last:])]


def hide(path: Path) -> Path:
    """Renames a checkpoint that is to be deleted, so that no part of it is ever taken for one.

    Raises:
        OSError: the file system refused.
    """
    hidden = path.with_name(f"{_REMOVED}{path.name}-{_place()}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    return hidden


def saving_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is visible."""
    return folder / f"{_SAVING}{folder_name(step)}-{_place()}"


def sweep(folder: Path) -> None:
    """Removes what killed processes of this host left half written or half deleted."""
    for path in folder.glob(".*"):
        if not path.name.startswith((_SAVING, _REMOVED)) or not path.is_dir():
            continue
        host, _, process = path.name.rpartition("-")
        if host.endswith(f"-{socket.gethostname()}") and not _runs_elsewhere(process):
            shutil.rmtree(path, ignore_errors=True)


def _place() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


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
