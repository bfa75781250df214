"""What a script under drop-in sees as ``horovod.torch.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torsh_trainer.dropin.horovod.common.elastic import run_fn
from torsh_trainer.dropin.horovod.torch.elastic.sampler import ElasticSampler
from torsh_trainer.dropin.horovod.torch.elastic.state import TorchState
from torsh_trainer.dropin.horovod.torch.mpi_ops import init, shutdown
from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func(state, ...)``, which begins anew from the last commit when a collective fails."""
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
