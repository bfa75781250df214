"""ToRSh Trainer: one training loop on whatever engine the user names."""

from __future__ import annotations

import importlib
from typing import Any

from torsh_trainer.utils.importing import collector_at_rest

__version__ = "0.1.0"

_PUBLIC = {
    "Trainer": "torsh_trainer.training.trainer",
    "Result": "torsh_trainer.training.trainer",
    "load_weights": "torsh_trainer.checkpoint.cli.loading",
    "Task": "torsh_trainer.tasks.base",
    "DataSource": "torsh_trainer.tasks.base",
    "Mean": "torsh_trainer.tasks.base",
    "Loading": "torsh_trainer.data.loading",
    "OptimizerSpec": "torsh_trainer.optim.optimizers",
    "Precision": "torsh_trainer.optim.precision",
    "CheckpointOptions": "torsh_trainer.checkpoint.base",
    "CommOptions": "torsh_trainer.comm.base",
    "Callback": "torsh_trainer.callbacks.base",
    "Auto": "torsh_trainer.strategies.auto",
    "Single": "torsh_trainer.strategies.single",
    "DP": "torsh_trainer.strategies.dp",
    "DDP": "torsh_trainer.strategies.ddp",
    "FSDP": "torsh_trainer.strategies.fsdp",
    "HorovodConfig": "torsh_trainer.integrations.horovod",
    "HorovodIntegration": "torsh_trainer.integrations.horovod",
    "DeepSpeedConfig": "torsh_trainer.integrations.deepspeed",
    "DeepSpeedIntegration": "torsh_trainer.integrations.deepspeed",
    "FSDPConfig": "torsh_trainer.integrations.sharded",
    "FullyShardedDataParallel": "torsh_trainer.integrations.sharded",
    "Inline": "torsh_trainer.launchers.inline",
    "Local": "torsh_trainer.launchers.local",
    "TorshError": "torsh_trainer.errors",
}
__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that the door answers --help without importing torch."""
    if name in _PUBLIC:
        with collector_at_rest():  # torch comes along
            return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'torsh_trainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
