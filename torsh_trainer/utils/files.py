"""Files that survive a crash: whole or not there, never half written."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torsh_trainer.errors import ConfigError, ResourceError, TorshError, TrainingError

DEEPEST = 100
"""Levels of mappings and lists in a file that others may have written."""

MOST_VALUES = 100_000
"""Values in such a file, those counted again that YAML's aliases repeat."""

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
        # Half of a character, which a name in a foreign file may have, is written as JSON has it.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
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
        OSError: it is no plain file, or the disk refused.
    """
    if not path.exists():
        return
    if (kind := not_plain(path)) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}", str(path))
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


def explain_error(error: Exception, doing: str, path: Path, *, rank: int) -> TorshError:
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


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def not_plain(path: Path) -> str | None:
    """What ``path`` is instead of a plain file (``a named pipe``); None for one, or for nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):  # whoever opens it says why
        return None


def check_plain(path: Path) -> None:
    """Makes sure that reading ``path`` can neither wait for ever nor go on for ever.

    Raises:
        ConfigError: it is a named pipe, a device, a socket or a folder.
    """
    kind = not_plain(path)
    if kind is not None:
        raise ConfigError(
            f"{path} is {kind}", fix="name a plain file; write what a pipe gives into one first"
        )


def parse_yaml(text: str) -> Any:
    """The one document of ``text``, for files that others may have written.

    Raises:
        ValueError: it is no YAML, is nested too deeply, or grows too large by its aliases.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is built
    try:
        _check_extent(text, loader)
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1})" if mark else ""
        raise ValueError(f"it is no YAML: {error.problem or error.context}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}".splitlines()[0]) from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if type(error) is ValueError and str(error).startswith("it "):
            raise
        # PyYAML's own constructors raise them, for `!!timestamp word` and the like.
        raise ValueError(
            "it is no YAML: a value is not of the type that it is said to be"
        ) from None


def _check_extent(text: str, loader: Any) -> None:
    """Walks over the events: what builds values from them recurses, and repeats aliases."""
    sizes: dict[str, int] = {}
    above: list[tuple[str | None, int]] = []
    anchor, count = None, 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            above.append((event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = above.pop()
            count += 1
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == name for name, _ in above):
                raise ValueError("it holds itself, by an alias")
            count += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
        if len(above) > DEEPEST:
            raise ValueError("it is nested too deeply")
        if count > MOST_VALUES:
            raise ValueError(
                f"it holds more than {MOST_VALUES:,} values, or repeats them by aliases"
            )


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
