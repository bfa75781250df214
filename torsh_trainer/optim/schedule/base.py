"""The contracts of a learning-rate schedule: pure (a function of the update) or stateful."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from torch.optim import Optimizer


class Schedule(abc.ABC):
    """Factor on every group's base learning rate; subclasses are frozen dataclasses of knobs."""

    name: ClassVar[str]

    @property
    def constant(self) -> bool:
        """True when ``factor`` is 1 for ever: the loop then leaves learning rates alone."""
        return False

    @abc.abstractmethod
    def factor(self, update: int, total: int | None) -> float:
        """The factor for the update numbered ``update`` (0 is the first) of ``total``.

        ``total`` is None when the run is bounded only by time.

        Raises:
            ConfigError: this schedule needs a total and there is none.
        """


class RunningSchedule(abc.ABC):
    """A stateful schedule at work: it sets learning rates in place, the same on every rank."""

    @abc.abstractmethod
    def on_update(self) -> None:
        """After each update; a step that was skipped is none."""

    @abc.abstractmethod
    def on_epoch(self) -> None:
        """After each epoch."""

    @abc.abstractmethod
    def on_evaluate(self, metrics: Mapping[str, float]) -> None:
        """After each evaluation, with metrics that are the same on every rank.

        Raises:
            ConfigError: the metric that this schedule follows is not among them.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain values (numbers, strings, booleans, None; lists and dicts of them)."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave, and sets the learning rates of that moment."""


class StatefulSchedule(abc.ABC):
    """A schedule that remembers: what comes next depends on more than the number of the update.

    Subclasses are frozen dataclasses of knobs; ``start`` gives the thing that runs.
    """

    name: ClassVar[str]
    takes_new_knobs: ClassVar[bool] = False
    """Whether a run that resumes may change the knobs: they then hold from there on. Where the
    state was made of them, it may not."""

    @abc.abstractmethod
    def start(
        self, optimizers: Mapping[str, Optimizer], *, total: int | None = None
    ) -> RunningSchedule:
        """The running schedule over ``optimizers``, whose learning rates are the base ones.

        Sets the learning rate of the first update. Start it before a checkpoint is loaded into
        the optimizers. ``total`` is the number of updates of the run, None when nobody knows.

        Raises:
            ConfigError: this schedule needs a total and there is none.
        """
