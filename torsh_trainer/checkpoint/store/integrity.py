"""The manifest of a checkpoint: what belongs to it, and whether it is all there, bit for bit.

Needs no torch, so that a launcher or a command can look at checkpoints in milliseconds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torsh_trainer.checkpoint.migration import VERSION, migrate_manifest
from torsh_trainer.checkpoint.store.places import StoragePath, explain_store_error, sizes, write
from torsh_trainer.checkpoint.store.summing import spare_threads, sum_up
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.utils.files import parse_json, strict_json

MANIFEST = "manifest.json"
METADATA = ".metadata"  # where every piece of every tensor lies
STATE = "state.json"  # plain values
HASHES = "hashes.json"  # of every tensor; older releases wrote none
FORMAT = "torsh_trainer.checkpoint"
_LARGEST_MANIFEST_BYTES = 1 << 26


@dataclass(frozen=True)
class Digest:
    """Size and CRC-32 (eight hexadecimal digits) of a file.

    A CRC finds damage, not malice, and costs less than half of what SHA-256 does.
    """

    size_bytes: int
    crc32: str

    @classmethod
    def of(cls, content: bytes) -> Digest:
        """Sums up what is in memory."""
        return cls(len(content), f"{zlib.crc32(content):08x}")


@dataclass(frozen=True)
class Manifest:
    """Facts about a complete checkpoint.

    ``run`` names the line of saves that it belongs to, ``sequence`` counts the saves into a folder:
    the highest is the newest, whatever the clock says. ``facts`` come from the caller (strategy,
    precision, ...); nothing in them is needed to load. ``version`` is the one of its files.
    """

    step: int
    world_size: int
    run: str
    sequence: int
    saved_at: str
    files: Mapping[str, Digest]
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION


def digest(path: StoragePath, *, threads: int = 1) -> Digest:
    """Reads a file and sums it up."""
    size, crc = sum_up(path, threads=threads)
    return Digest(size, f"{crc:08x}")


def write_manifest(folder: StoragePath, manifest: Manifest) -> None:
    """Writes the manifest, durably; it is the last file of a checkpoint.

    Raises:
        OSError: the disk refused.
        Unreachable: a remote store did.
    """
    content = {"format": FORMAT, "version": manifest.version, **asdict(manifest)}
    text = strict_json({**content, "crc32": _crc(content)})
    write(folder / MANIFEST, text.encode())


def read_manifest(folder: StoragePath) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        ResourceError: it is missing or damaged.
        Unreachable: a remote store did not answer.
        ConfigError: a newer release wrote it.
    """
    path = folder / MANIFEST
    try:
        content = parse_json(_small_text(path))
        crc = content.pop("crc32")
        version = content.get("version", 0)
        if content.get("format") == FORMAT and type(version) is int and version > VERSION:
            raise ConfigError(
                f"{folder} has format {version}, and this release reads up to {VERSION}",
                fix="upgrade torsh-trainer to the release that saved it",
            )
        if crc != _crc(content) or content.pop("format") != FORMAT:
            raise ValueError("its checksum")
        if type(version) is not int or version < 1:
            raise ValueError("its version")
        migrate_manifest(content, version)
        return _manifest(content)
    except FileNotFoundError as error:
        raise _damage_error(folder, f"it has no {MANIFEST}") from error
    except OSError as error:
        raise _damage_error(folder, f"{path.name} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _damage_error(folder, f"{path.name} is not what was written") from error


def _small_text(path: StoragePath) -> str:
    """The text of a file that is a few KiB, unless somebody has put something else there.

    Raises:
        ValueError: it is no file, or much too large.
        OSError: the disk refused.
    """
    if isinstance(path, Path) and path.exists() and not path.is_file():
        raise ValueError("it is no file")  # a pipe would keep its reader waiting for ever
    if path.stat().st_size > _LARGEST_MANIFEST_BYTES:
        raise ValueError("it is too large")
    return path.read_text(encoding="utf-8")


def _manifest(content: dict[str, Any]) -> Manifest:
    """A manifest of what was decoded.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is none.
    """
    files = {name: Digest(**entry) for name, entry in content.pop("files").items()}
    manifest = Manifest(**content, files=files)
    counts = [manifest.step, manifest.sequence, manifest.world_size]
    counts += [one.size_bytes for one in files.values()]
    texts = [manifest.run, manifest.saved_at, *(one.crc32 for one in files.values())]
    tables = [manifest.metrics, manifest.facts]
    if not (
        all(type(count) is int and count >= 0 for count in counts)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(table, dict) for table in tables)
        and all(value is None or type(value) in (int, float) for value in manifest.metrics.values())
        and files.keys() >= {STATE, METADATA}
        and not any(name in ("", ".", "..", MANIFEST) or {*name} & {*"/\\\0"} for name in files)
    ):
        raise ValueError("its values")
    return manifest


def check_sizes(folder: StoragePath, manifest: Manifest) -> None:
    """Asks the file system for every file's size; reads none.

    Raises:
        ResourceError: a file is missing or of another size; the message names it.
        Unreachable: a remote store did not answer.
    """
    try:
        there = sizes(folder)
    except OSError as error:
        raise _damage_error(folder, f"it cannot be read ({error.strerror})") from error
    for name, expected in manifest.files.items():
        size = there.get(name)
        if size is None:
            raise _damage_error(folder, f"{name} is missing")
        if size != expected.size_bytes:
            raise _damage_error(
                folder, f"{name} has {size} bytes, and {expected.size_bytes} were written"
            )


def verify(folder: StoragePath, *, rank: int = 0, size: int = 1) -> Manifest:
    """Checks that a checkpoint is what was written; returns its manifest.

    Sizes are checked by everyone, the contents of the files shared out over ``size`` processes.

    Raises:
        ResourceError: it is not; the message names the file.
        Unreachable: a remote store did not answer.
        ConfigError: a newer release wrote it.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    for name in sorted(manifest.files)[rank::size]:
        path = folder / name
        try:
            found = digest(path, threads=spare_threads(size))
        except Exception as error:  # every library of a store has errors of its own
            if isinstance(path, Path) and isinstance(error, OSError):
                why = f"{path.name} cannot be read ({error.strerror})"
                raise _damage_error(folder, why) from error
            raise explain_store_error(error, "read", path, rank=rank) from error
        if found != manifest.files[name]:
            raise _damage_error(
                folder,
                f"{name} is not what was written "
                f"(CRC-32 {found.crc32}, and it was {manifest.files[name].crc32})",
            )
    return manifest


def _crc(content: Mapping[str, Any]) -> str:
    """Of the canonical form, so that it does not depend on spaces or on the order of keys."""
    canonical = json.dumps(json.loads(strict_json(content)), sort_keys=True)
    return f"{zlib.crc32(canonical.encode()):08x}"


def _damage_error(folder: StoragePath, why: str) -> ResourceError:
    return ResourceError(
        f"the checkpoint {folder} is damaged or incomplete: {why}",
        fix="resume from another one with checkpoint.resume=PATH, or copy this one again",
        path=str(folder),
        why=why,
    )
