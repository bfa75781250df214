"""Folders of an MPI job, which go with it, or with the next one when the job was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "torsh-mpi-"
_YOUNG_S = 60.0
"""Whoever makes a folder locks it at once; a younger one without a lock may be about to be."""


class Folder:
    """A folder in ``parent``, locked for as long as a process has ``descriptor``.

    The kernel lets go of the lock however the last of these processes ends: so a folder that
    nobody has locked belongs to nobody.
    """

    def __init__(self, parent: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: the folder may stay
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Removes it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.descriptor)


def remove_orphans(parent: Path) -> list[Path]:
    """Removes the folders of jobs in ``parent`` that were killed; gives their paths.

    What a living process has locked stays, and so does what is another user's.
    """
    removed = []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # another run removes it as well
            if _is_orphan(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_orphan(path: Path) -> bool:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    if time.time() - found.st_ctime < _YOUNG_S:
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
