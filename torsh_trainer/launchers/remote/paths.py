"""Where modules are found: what belongs to an installation of Python, and what to the user."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path


def split_path(path: Sequence[str]) -> tuple[list[str], list[str]]:
    """The entries of ``sys.path`` before and after those of this Python's installation.

    Another host has its own installation, perhaps elsewhere; these keep their names.
    """
    own = [_is_installed(entry) for entry in path]
    first = own.index(True) if True in own else len(path)
    front = [entry for entry in path[:first] if entry]
    back = [entry for entry, ours in zip(path[first:], own[first:], strict=True) if not ours]
    return front, back


def _is_installed(entry: str) -> bool:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    place = Path(entry)
    if place.name == f"python{sys.version_info[0]}{sys.version_info[1]}.zip":
        return True
    return any(place == Path(folder) or Path(folder) in place.parents for folder in folders)
