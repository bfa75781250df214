"""``deepspeed.checkpointing``: activations computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.zero.processes import cuts_models
from torsh_trainer.errors import Unsupported

__getattr__ = refuse_unknown(__name__)
_configured: list[bool] = []


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Where activations are kept moves no number.

    Raises:
        Unsupported: ``mpu_`` cuts a model over processes.
    """
    if cuts_models(mpu_):
        raise Unsupported(
            "deepspeed.checkpointing.configure(mpu): parallelism within a model",
            fix="run this script with DeepSpeed itself",
        )
    _configured[:] = [True]


def is_configured() -> bool:
    """``configure`` has been called."""
    return bool(_configured)


def reset() -> None:
    """Nothing is kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose activations the backward computes again."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
