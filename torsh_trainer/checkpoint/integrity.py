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

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.files import strict_json, write_file

MANIFEST = "manifest.json"
METADATA = ".metadata"  # where every piece of every tensor lies
STATE = "state.json"  # plain values
FORMAT = "torsh_trainer.checkpoint"
VERSION = 1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Digest:
    """Size and CRC-32 (eight hexadecimal digits) of a file.

    A CRC finds damage, not malice, and costs less than half of what SHA-256 does.
    """

    size_bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """Facts about a complete checkpoint.

    ``run`` names the line of saves that it belongs to, ``sequence`` counts the saves into a folder:
    the highest is the newest, whatever the clock says. ``facts`` come from the caller (strategy,
    precision, ...); nothing in them is needed to load.
    """

    step: int
    world_size: int
    run: str
    sequence: int
    saved_at: str
    files: Mapping[str, Digest]
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


def digest(path: Path) -> Digest:
    """Reads a file and sums it up."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_CHUNK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return Digest(size, f"{crc:08x}")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, durably; it is the last file of a checkpoint.

    Raises:
        OSError: the disk refused.
    """
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    text = strict_json({**content, "crc32": _crc(content)})
    write_file(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        ResourceError: it is missing or damaged.
        ConfigError: a newer release wrote it.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        crc = content.pop("crc32")
    except FileNotFoundError as error:
        raise _damaged(folder, f"it has no {MANIFEST}") from error
    except OSError as error:
        raise _damaged(folder, f"{path.name} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError) as error:
        raise _damaged(folder, f"{path.name} is not what was written") from error
    if content.get("format") == FORMAT and content.get("version", 0) > VERSION:
        raise ConfigError(
            f"{folder} has format {content['version']}, and this release reads up to {VERSION}",
            fix="upgrade torsh-trainer to the release that saved it",
        )
    if crc != _crc(content) or content.pop("format") != FORMAT:
        raise _damaged(folder, f"{path.name} is not what was written")
    del content["version"]
    files = {name: Digest(**entry) for name, entry in content.pop("files").items()}
    return Manifest(**content, files=files)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Asks the file system for every file's size; reads none.

    Raises:
        ResourceError: a file is missing or of another size; the message names it.
    """
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _damaged(folder, f"{path.name} cannot be read ({error.strerror})") from error
        if size != expected.size_bytes:
            raise _damaged(
                folder, f"{name} has {size} bytes, and {expected.size_bytes} were written"
            )


def verify(folder: Path, *, rank: int = 0, size: int = 1) -> Manifest:
    """Checks that a checkpoint is what was written; returns its manifest.

    Sizes are checked by everyone, the contents of the files shared out over ``size`` processes.

    Raises:
        ResourceError: it is not; the message names the file.
        ConfigError: a newer release wrote it.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    for name in sorted(manifest.files)[rank::size]:
        path = folder / name
        try:
            found = digest(path)
        except OSError as error:
            raise _damaged(folder, f"{path.name} cannot be read ({error.strerror})") from error
        if found != manifest.files[name]:
            raise _damaged(
                folder,
                f"{name} is not what was written "
                f"(CRC-32 {found.crc32}, and it was {manifest.files[name].crc32})",
            )
    return manifest


def _crc(content: Mapping[str, Any]) -> str:
    """Of the canonical form, so that it does not depend on spaces or on the order of keys."""
    canonical = json.dumps(json.loads(strict_json(content)), sort_keys=True)
    return f"{zlib.crc32(canonical.encode()):08x}"


def _damaged(folder: Path, why: str) -> ResourceError:
    return ResourceError(
        f"the checkpoint {folder} is damaged or incomplete: {why}",
        fix="resume from another one with checkpoint.resume=PATH, or copy this one again",
        path=str(folder),
    )
