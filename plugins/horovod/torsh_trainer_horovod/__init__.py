"""``strategy=horovod``: the real Horovod; nothing here loads it until it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "Horovod": "strategy",
    "HorovodConfig": "integration",
    "HorovodElasticConfig": "integration",
    "HorovodIntegration": "integration",
    "local_rank": "integration",
    "local_size": "integration",
    "rank": "integration",
    "size": "integration",
}
__all__ = [
    "Horovod",
    "HorovodConfig",
    "HorovodElasticConfig",
    "HorovodIntegration",
    "local_rank",
    "local_size",
    "rank",
    "size",
]


def __getattr__(name: str) -> Any:
    """The build needs no torch, and may have to say that there is none."""
    if name in _NAMES:
        return getattr(importlib.import_module(f"torsh_trainer_horovod.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'torsh_trainer_horovod' has no attribute {name!r}")
