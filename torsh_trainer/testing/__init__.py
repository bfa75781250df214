"""Contract suites that ship: a plugin proves itself by a test class that inherits one.

Nothing here imports pytest; the suites are plain classes with methods that it collects.
"""

from __future__ import annotations

import importlib
from typing import Any

_SUITES = {
    "CommunicatorContract": "torsh_trainer.testing.communicator",
    "EnvironmentContract": "torsh_trainer.testing.environment",
    "LauncherContract": "torsh_trainer.testing.launcher",
    "StrategyContract": "torsh_trainer.testing.strategy",
    "RankPool": "torsh_trainer.testing.ranks",
}
__all__ = [
    "CommunicatorContract",
    "EnvironmentContract",
    "LauncherContract",
    "RankPool",
    "StrategyContract",
]


def __getattr__(name: str) -> Any:
    """Suites load on first use: that of environments needs no torch."""
    if name in _SUITES:
        return getattr(importlib.import_module(_SUITES[name]), name)
    raise AttributeError(f"module 'torsh_trainer.testing' has no attribute {name!r}")
