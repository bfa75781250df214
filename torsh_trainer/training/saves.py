"""The checkpoints of a training: made, told, and tried again where the disk has refused one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from torsh_trainer.callbacks.base import SaveReport
from torsh_trainer.checkpoint.base import Checkpointer
from torsh_trainer.errors import ResourceError
from torsh_trainer.training.cadence import Cadence
from torsh_trainer.training.reports import Reports

log = logging.getLogger(__name__)

MakeState = Callable[[], Mapping[str, Any]]


class Saves:
    """Saves a training through its checkpointer; every method is collective.

    ``step`` is the step after which it was saved last, in the counting of the cadence; ``path`` is
    where. ``is_prepared`` says that the checkpointer knows what a state looks like.
    """

    def __init__(self, checkpointer: Checkpointer, cadence: Cadence, reports: Reports) -> None:
        self.step = 0
        self.path: str | None = None
        self.is_prepared = False
        self._checkpointer = checkpointer
        self._cadence = cadence
        self._reports = reports

    def is_owed_at_end(self, step: int) -> bool:
        """Whether a training that ends after ``step`` has yet to be saved."""
        return self._cadence.save_at_end and self.step < step

    def is_owed_at_stop(self, step: int) -> bool:
        """Whether one that is stopped after ``step`` has: wherever anything is ever saved."""
        return self._cadence.saves and self.step < step

    def prepare(self, make_state: MakeState) -> None:
        """Once the optimizer has its state, after the first step: the first save waits less."""
        self.is_prepared = True
        if self._cadence.save_every is not None or self._cadence.save_every_epochs is not None:
            began = time.perf_counter()
            self._checkpointer.prepare(make_state)
            self._reports.timer.pause(time.perf_counter() - began)

    def save(
        self,
        step: int,
        make_state: MakeState,
        metrics: Mapping[str, float],
        *,
        counted: int | None = None,
    ) -> None:
        """Saves this moment as the checkpoint of ``step``; ``metrics`` are of its own weights.

        ``counted`` is the step in the counting of the cadence, where that is another.

        Raises:
            ResourceError: the disk refused, twice in a row.
            ConfigError: the state holds what cannot be saved.
        """
        began = time.perf_counter()
        self.is_prepared = True
        failed = self._has_last_failed()
        self.path = str(self._checkpointer.save(step, make_state(), metrics))
        if failed:  # a second failure in a row is not for the next save to find out
            self._checkpointer.wait()
        self.step = step if counted is None else counted
        self._reports.tell_save(SaveReport(step, self.path, time.perf_counter() - began))

    def finish(self, save: Callable[[], object]) -> None:
        """Returns once no save is under way; one that failed is tried once more, by ``save``."""
        if self._has_last_failed():
            save()
            self._checkpointer.wait()

    def _has_last_failed(self) -> bool:
        """Waits for a save under way; true when the disk refused it, which may be over by now."""
        try:
            self._checkpointer.wait()
        except ResourceError as error:
            log.warning("%s. It is tried again", error)
            return True
        return False

    def as_plain(self) -> dict[str, Any]:
        """What the processes of another attempt have to know of it."""
        return {"at": self.step, "path": self.path, "run": self._checkpointer.run}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes what ``as_plain`` gave."""
        self.step, self.path = saved["at"], saved["path"]
