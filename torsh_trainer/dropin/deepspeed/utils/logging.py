"""``deepspeed.utils.logging``."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
logger = logging.getLogger("DeepSpeed")
logger.setLevel(logging.INFO)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on ``ranks``: all where -1 is among them or none are named."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
