"""Habits of Horovod: what its DistributedOptimizer adds up instead of averaging it."""

from __future__ import annotations

from dataclasses import dataclass

from torsh_trainer.emulation.base import Emulation, Refuse
from torsh_trainer.errors import ConfigError


@dataclass(frozen=True)
class Sums(Emulation):
    """``passes`` backward passes, and with ``over_ranks`` processes too, are summed.

    Both multiply the gradient.
    """

    passes: int = 1
    over_ranks: bool = False

    def gradient_scale(self, ranks: int) -> float:
        return float(self.passes * (ranks if self.over_ranks else 1))

    def check_accumulation(self, accumulate: int) -> None:
        if accumulate % self.passes:
            raise ConfigError(
                f"strategy.backward_passes_per_step={self.passes} does not divide "
                f"trainer.accumulate={accumulate}",
                fix="accumulate counts every backward of a step: make it a multiple",
            )

    def check_backward(self, refuse: Refuse, *, manual: bool) -> None:
        if self.over_ranks:
            raise refuse(
                "strategy.op=sum under manual optimization, where a gradient is averaged",
                use="set strategy.op=average, and multiply the loss",
            )
