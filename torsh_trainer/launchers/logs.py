"""The folder in which the workers of a job leave their logs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.errors import ResourceError

TAIL_LINES = 20


@dataclass
class Logs:
    """Where logs lie; ``keep`` has a folder stay that would go again."""

    path: Path
    keep: bool = False


@contextlib.contextmanager
def log_folder(wanted: Path | None) -> Iterator[Logs]:
    """The folder for logs; one of our own making goes again when nothing failed.

    Raises:
        ResourceError: it cannot be made.
    """
    try:
        if wanted is not None:
            wanted.mkdir(parents=True, exist_ok=True)
        logs = Logs(wanted or Path(tempfile.mkdtemp(prefix="torsh-logs-")))
    except OSError as error:
        raise ResourceError(
            f"the folder for logs cannot be made: {error}", fix="choose another run directory"
        ) from error
    try:
        yield logs
    finally:
        if wanted is None and not logs.keep:
            shutil.rmtree(logs.path, ignore_errors=True)


def tail(file: Path) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL_LINES:])
