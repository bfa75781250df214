"""Learning rates in a run: a schedule applied to the optimizers' groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.schedule.base import RunningSchedule, Schedule, StatefulSchedule

_SCHEDULED = ("lr", "momentum", "betas")
"""What schedules change in a parameter group."""


class LearningRateDriver:
    """Sets every group's learning rate before each update.

    ``total`` is the number of updates that the run will make, None when unknown. A group's base
    rate is what the optimizer was built with; a pure schedule multiplies it by its factor.
    """

    def __init__(
        self,
        schedule: Schedule | StatefulSchedule | None,
        optimizers: Mapping[str, Optimizer],
        *,
        total: int | None,
    ) -> None:
        self._groups = [group for o in optimizers.values() for group in o.param_groups]
        self._base = [float(group["lr"]) for group in self._groups]
        self._total = total
        self._running: RunningSchedule | None = None
        self._pure: Schedule | None = None
        if isinstance(schedule, StatefulSchedule):
            self._running = schedule.start(optimizers, total=total)
        elif schedule is not None:
            schedule.factor(0, total)  # a schedule that needs a total says so before the first step
            self._pure = None if schedule.constant else schedule
        self._first = [{k: group[k] for k in _SCHEDULED if k in group} for group in self._groups]
        # Read each step, so plain attributes.
        self.follows_updates = self._pure is not None
        """The rates are a function of the update: ``before_update`` sets them."""
        self.remembers = self._running is not None
        """The schedule is stateful: it is told of updates, epochs and evaluations."""

    @property
    def learning_rate(self) -> float:
        """The first group's."""
        return float(self._groups[0]["lr"])

    def before_update(self, update: int) -> None:
        if self._pure is not None:
            factor = self._pure.factor(update, self._total)
            for group, base in zip(self._groups, self._base, strict=True):
                group["lr"] = base * factor

    def after_update(self) -> None:
        if self._running is not None:
            self._running.on_update()

    def on_epoch(self) -> None:
        if self._running is not None:
            self._running.on_epoch()

    def on_evaluate(self, metrics: Mapping[str, float]) -> None:
        if self._running is not None:
            self._running.on_evaluate(metrics)

    def state_dict(self, updates: int) -> dict[str, Any]:
        """Base rates, progress of a stateful schedule, and the rates of the update to come.

        ``next`` is for other programs, which know a rate by what the optimizer holds; a run sets
        it anew before each update.
        """
        running = {} if self._running is None else self._running.state_dict()
        return {"base": list(self._base), "running": running, "next": self._next(updates)}

    def _next(self, updates: int) -> list[float]:
        if self._pure is None or (self._total is not None and updates >= self._total):
            return [float(group["lr"]) for group in self._groups]
        factor = self._pure.factor(updates, self._total)
        return [base * factor for base in self._base]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Progress of a stateful schedule; base rates stay those of this run's configuration.

        ``running`` None was another schedule's state: this one begins afresh.
        """
        if self._running is not None and state["running"]:
            try:
                self._running.load_state_dict(state["running"])
            except KeyError as error:  # of an import: there the setup does not tell
                raise ConfigError(
                    f"the checkpoint holds the state of another schedule: it has no {error}",
                    fix="choose the schedule that it was saved with",
                ) from error
            return
        pure = self._running is None and state["running"] == {}
        if pure and self._pure is not None:
            return  # the rates of the last update, which a save before the next one holds as well
        # The optimizer came with what the schedule of the run that was saved had made of it.
        settings = ("lr",) if pure else _SCHEDULED
        for group, first in zip(self._groups, self._first, strict=True):
            group.update({key: first[key] for key in settings if key in first})
