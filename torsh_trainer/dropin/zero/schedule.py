"""The learning-rate scheduler that a configuration of DeepSpeed names, as a script sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from torsh_trainer.optim.learning_rates import LearningRateDriver


class ConfiguredScheduler:
    """Sets the rates of the update to come; the engine steps it after each update."""

    def __init__(self, schedule: Any, optimizers: Mapping[str, Optimizer]) -> None:
        self._driver = LearningRateDriver(schedule, optimizers, total=None)
        self._groups = [group for one in optimizers.values() for group in one.param_groups]
        self._updates = 0
        self._driver.before_update(0)

    def step(self, *_: Any) -> None:
        """An update has been made."""
        self._driver.after_update()
        self._updates += 1
        self._driver.before_update(self._updates)

    def get_last_lr(self) -> list[float]:
        """The rate of every group."""
        return [float(group["lr"]) for group in self._groups]

    def get_lr(self) -> list[float]:
        """As ``get_last_lr``."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """How many updates there were, and what the schedule remembers."""
        return {"updates": self._updates, "driver": self._driver.state_dict(self._updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave."""
        self._updates = int(state["updates"])
        self._driver.load_state_dict(state["driver"])
        self._driver.before_update(self._updates)
