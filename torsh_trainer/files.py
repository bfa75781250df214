"""Files that survive a crash: whole or not there, never half written."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ResourceError, TorshError, TrainingError

_NEXT_MOVE = {
    errno.ENOSPC: "free some space there, or choose another disk",
    errno.EDQUOT: "the quota of this user is used up: free some space, or choose another disk",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "this user may not write there: choose another folder",
    errno.EPERM: "this user may not write there: choose another folder",
    errno.EFBIG: "the process may not write files that large: raise `ulimit -f`",
}


def write_file(path: Path, data: bytes) -> None:
    """Writes ``data`` to ``path`` and returns once it is on the disk.

    Another process sees the file that was there before or the whole new one.

    Raises:
        OSError: the disk refused; what was there before is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the disk may be read-only by now
            temporary.unlink(missing_ok=True)
        raise of_file(error, path) from error
    sync_folder(path.parent)


def write_text(path: Path, text: str, *, fix: str) -> None:
    """Writes what a user has named a place for, folders included.

    Raises:
        ResourceError: it cannot be written; ``fix`` says what to do instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}", fix=fix) from error


def of_file(error: OSError, path: Path) -> OSError:
    """The same error, told of ``path``: what refuses to be written does not say what it is."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def sync_folder(folder: Path) -> None:
    """Makes names created, renamed or deleted in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; the rename itself is still atomic.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> None:
    """Moves a file of an earlier run out of the way: result.json becomes result.1.json.

    Raises:
        OSError: the disk refused.
    """
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)


def disk_error(error: OSError, doing: str, path: Path, *, setting: str = "") -> ResourceError:
    """What the user reads when the disk refused: ``cannot DOING PATH: No space left on device``.

    ``setting`` names the knob that points elsewhere.
    """
    reason = error.strerror or type(error).__name__
    if error.filename:
        reason += _which(Path(os.fsdecode(error.filename)), path)
    move = _NEXT_MOVE.get(error.errno or 0, "check the path")
    if doing == "read" and isinstance(error, PermissionError):
        move = "this user may not read it: change its permissions, or name another"
    return ResourceError(
        f"cannot {doing} {path}: {reason}",
        fix=f"{move} ({setting})" if setting else move,
        path=str(path),
        errno=error.errno,
    )


def _which(file: Path, path: Path) -> str:
    """The file that refused, where ``path`` does not say it: by name alone if it lies within."""
    if path.parent not in file.parents:
        return f" ({file})"
    return f" ({file.name})" if len(file.parents) > len(path.parents) else ""


def explained(error: Exception, doing: str, path: Path, *, rank: int) -> TorshError:
    """An error as the user reads it, with its cause attached."""
    if isinstance(error, TorshError):
        return error
    told: TorshError
    if isinstance(error, OSError):
        told = disk_error(error, doing, path, setting="checkpoint.dir")
    else:
        told = TrainingError(
            f"rank {rank} could not {doing} {path}: {type(error).__name__}: {error}",
            fix="debug=true shows the traceback",
            rank=rank,
        )
    told.__cause__ = error
    return told


def parse_json(text: str) -> Any:
    """The inverse of ``strict_json``, for files that others may have written.

    Raises:
        ValueError: it is no JSON; or a key comes twice in one object, it is nested too deeply, or
            it holds NaN or an infinity.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice in it")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"it holds {name}")


def strict_json(value: Any, *, indent: int | None = 2) -> str:
    """JSON that every reader accepts: NaN and infinities become null, objects their text."""
    return json.dumps(_strict(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _strict(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [_strict(item) for item in value]
    return str(value)
