"""Numbers that a task keeps while it trains, and that no checkpoint has."""

from __future__ import annotations

import logging

from torsh_trainer.tasks.base import Task

log = logging.getLogger(__name__)


class UnsavedNumbers:
    """Attributes of ``task`` that change while it trains, if it has no ``state_dict`` of its own.

    A counter that a loss depends on would begin anew after a resume, without a word.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._before = numbers_of(task)
        self._is_told = type(task).state_dict is not Task.state_dict

    def tell(self) -> None:
        """Names them once in the log, when a checkpoint is saved."""
        if self._is_told:
            return
        now = numbers_of(self._task)
        changed = [name for name, value in now.items() if self._before.get(name) != value]
        if changed:
            self._is_told = True
            log.warning(
                "%s.%s has changed while it trains and is in no checkpoint: a resume begins with "
                "what the constructor says; define state_dict and load_state_dict in the task",
                type(self._task).__name__,
                changed[0],
            )


def numbers_of(task: Task) -> dict[str, float]:
    """The attributes of ``task`` that are plain numbers, by their names."""
    return {
        name: value
        for name, value in vars(task).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
