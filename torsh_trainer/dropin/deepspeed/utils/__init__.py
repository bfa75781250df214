"""``deepspeed.utils``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torsh_trainer.dropin.deepspeed.utils import logging as logging
from torsh_trainer.dropin.deepspeed.utils.logging import log_dist as log_dist
from torsh_trainer.dropin.deepspeed.utils.logging import logger as logger
from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.zero.gathering import (
    safe_get_full_fp32_param as safe_get_full_fp32_param,
)
from torsh_trainer.dropin.zero.gathering import safe_get_full_grad as safe_get_full_grad
from torsh_trainer.dropin.zero.gathering import (
    safe_get_full_optimizer_state as safe_get_full_optimizer_state,
)

__getattr__ = refuse_unknown(__name__)


class RepeatingLoader:
    """Begins ``loader`` again where it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
