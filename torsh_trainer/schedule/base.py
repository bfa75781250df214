"""The contract of a learning-rate schedule: a pure function of the number of updates."""

from __future__ import annotations

import abc
from typing import ClassVar


class Schedule(abc.ABC):
    """Factor on every group's base learning rate; subclasses are frozen dataclasses of knobs."""

    name: ClassVar[str]
    constant: ClassVar[bool] = False
    """True when ``factor`` is 1 for ever: the loop then leaves learning rates alone."""

    @abc.abstractmethod
    def factor(self, update: int, total: int | None) -> float:
        """The factor for the update numbered ``update`` (0 is the first) of ``total``.

        ``total`` is None when the run is bounded only by time.

        Raises:
            ConfigError: this schedule needs a total and there is none.
        """
