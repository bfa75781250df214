"""What is due when: reports, evaluations and saves, by steps and epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """What is due when, in steps or epochs; None is never.

    Steps and epochs are counts of those that are done, from 1.
    """

    log_every: int
    eval_every: int | None = None
    eval_every_epochs: int | None = None
    save_every: int | None = None
    save_every_epochs: int | None = None
    save_at_end: bool = False

    @property
    def saves(self) -> bool:
        """Whether anything is ever saved."""
        return self.save_at_end or bool(self.save_every or self.save_every_epochs)

    @property
    def evaluates(self) -> bool:
        """Whether training is ever interrupted by an evaluation."""
        return self.eval_every is not None or self.eval_every_epochs is not None

    def next_report(self, step: int, *, last_step: int | None = None) -> float:
        """The first step after ``step`` that is reported: the first, the last, every so many."""
        if step < 1:
            return 1
        every = _next(step, self.log_every)
        return every if last_step is None or last_step <= step else min(every, last_step)

    def next_stop(self, step: int) -> float:
        """The first step after ``step`` at which an evaluation or a save is due by its number."""
        return min(_next(step, self.eval_every), _next(step, self.save_every))

    def evaluates_after(self, step: int | None = None, epoch: int | None = None) -> bool:
        """Whether an evaluation is due after ``step``, or after ``epoch`` where one has ended."""
        return _is_due(step, self.eval_every) or _is_due(epoch, self.eval_every_epochs)

    def saves_after(self, step: int | None = None, epoch: int | None = None) -> bool:
        """Whether a save is due after ``step``, or after ``epoch`` where one has ended."""
        return _is_due(step, self.save_every) or _is_due(epoch, self.save_every_epochs)


def _next(count: int, every: int | None) -> float:
    return math.inf if every is None else count - count % every + every


def _is_due(count: int | None, every: int | None) -> bool:
    return count is not None and every is not None and count % every == 0
