"""How the processes of one job exchange values; see docs/comm.md.

Collectives as functions, for scripts and libraries, are ``torsh_trainer.distributed``.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "torsh_trainer.comm.start": ("create",),
    "torsh_trainer.comm.failures": (
        "BackendError",
        "BackendNotInitialized",
        "CollectiveArgumentError",
        "CommunicationError",
        "MismatchError",
        "RendezvousError",
    ),
    "torsh_trainer.comm.compression": (
        "CompressionAlgorithm",
        "CompressorMemory",
        "GradientCompressor",
    ),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [*sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    """Public names load on first use: what only asks for a part does not wait for torch."""
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; collectives as functions are in "
        "torsh_trainer.distributed"
    )


def __dir__() -> list[str]:
    return __all__
