"""Found first on the path of processes that are recorded; then does what another would have done.

Python imports ``sitecustomize`` in every process; this one starts the recorder where it is wanted.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_here = Path(__file__).resolve().parent


def _load(path: Path, name: str) -> object:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


for _folder in sys.path:  # the one that stands behind
    _other = Path(_folder or ".").resolve() / "sitecustomize.py"
    if _other.parent != _here and _other.is_file():
        _load(_other, "_torsh_other_sitecustomize")
        break
_load(_here / "recording.py", "_torsh_recording").start()  # type: ignore[attr-defined]
