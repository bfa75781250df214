"""What processes of one job must have in common on every host: versions, and code."""

from __future__ import annotations

import hashlib
import os
import sys
from importlib import metadata
from pathlib import Path

import torsh_trainer

_MOST_FILES = 5000
_MOST_FOLDERS = 20_000


def collect_versions() -> dict[str, str]:
    """Name -> version of what ranks exchange objects of; ``none`` where it is not installed."""
    return {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "torch": _version_of("torch"),
        "torsh-trainer": torsh_trainer.__version__,
        "numpy": _version_of("numpy"),
    }


def hash_package() -> str:
    """``hash_code`` of this package."""
    return hash_code(Path(torsh_trainer.__file__).parent)


def hash_code(folder: Path) -> str:
    """A short hash of the Python files of a folder, by name and content; empty without any.

    Of a very large folder the first files alone.
    """
    if not folder.is_dir():
        return ""
    found, digest = 0, hashlib.sha256()
    for seen, (base, folders, names) in enumerate(os.walk(folder)):
        folders[:] = sorted(n for n in folders if n[0] != "." and n not in ("runs", "node_modules"))
        if seen >= _MOST_FOLDERS or found >= _MOST_FILES:
            break
        for name in sorted(names):
            if not name.endswith(".py") or found >= _MOST_FILES:
                continue
            path = Path(base, name)
            found += 1
            digest.update(str(path.relative_to(folder)).encode("utf-8", "replace"))
            try:
                digest.update(path.read_bytes())
            except OSError as error:
                digest.update(str(error.errno).encode())
    return digest.hexdigest()[:12] if found else ""


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
