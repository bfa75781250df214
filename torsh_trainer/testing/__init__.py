"""What ships for tests of a plugin: contract suites, pools of ranks, a fake accelerator.

A plugin proves itself by a test class that inherits a suite. Nothing here imports pytest; the
suites are plain classes with methods that it collects.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "CheckpointerContract": "torsh_trainer.testing.checkpointer",
    "CommunicatorContract": "torsh_trainer.testing.communicator",
    "EnvironmentContract": "torsh_trainer.testing.environment",
    "LauncherContract": "torsh_trainer.testing.launcher",
    "StrategyContract": "torsh_trainer.testing.strategy",
    "SubmitLauncherContract": "torsh_trainer.testing.submission",
    "TranslatorContract": "torsh_trainer.testing.translator",
    "TransportContract": "torsh_trainer.testing.transport",
    "RankPool": "torsh_trainer.testing.ranks",
    "FakeAccelerator": "torsh_trainer.testing.fake_accelerator",
    "count_step": "torsh_trainer.testing.fake_accelerator",
    "run_on_fake_accelerator": "torsh_trainer.testing.fake_accelerator",
}
__all__ = [
    "CheckpointerContract",
    "CommunicatorContract",
    "EnvironmentContract",
    "FakeAccelerator",
    "LauncherContract",
    "RankPool",
    "StrategyContract",
    "SubmitLauncherContract",
    "TranslatorContract",
    "TransportContract",
    "count_step",
    "run_on_fake_accelerator",
]


def __getattr__(name: str) -> Any:
    """Names load on first use: the suite of environments needs no torch."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'torsh_trainer.testing' has no attribute {name!r}")
