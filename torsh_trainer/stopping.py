"""When a fit is over, and how all ranks come to the same answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torsh_trainer.comm.base import Communicator
from torsh_trainer.signals import Signals


@dataclass(frozen=True)
class Limits:
    """When a fit is over; None does not bound it."""

    max_steps: int | None = None
    max_epochs: int | None = None
    max_time_s: float | None = None


Watch = Callable[[Iterable[tuple[Any, bool]]], Iterable[tuple[Any, bool]]]
"""Passes the batches of an evaluation on, until it is broken off."""


class BrokenOffError(Exception):
    """All ranks know of a signal in the middle of an evaluation."""


class Stop:
    """Whether all ranks stop after this step, or within an evaluation.

    One process decides at once. Several agree: after reports and evaluations, where a callback's
    wish must count at once, and besides about once a second, every rank adds what it knows to one
    small reduction, at steps that all of them compute alike.
    """

    def __init__(
        self, comm: Communicator, limits: Limits, signals: Signals, started: float
    ) -> None:
        self.signal = 0
        self._comm = comm
        self._alone = comm.world.size == 1
        self._deadline = None if limits.max_time_s is None else started + limits.max_time_s
        self._signals = signals
        self._wanted = False
        self._next = 1
        self._last = (0, started)

    def now(self, step: int, wanted: bool, *, meet: bool) -> bool:
        if wanted:
            self._wanted = True
        if self._alone:
            self.signal = self._signals.received
            return self._wanted or self.signal > 0 or (self._deadline is not None and self._late())
        return (meet or step >= self._next) and self._agree(step)

    def meet(self, step: int) -> None:
        """Lets every rank know of a signal, where none has anything left to do."""
        if self._alone:
            self.signal = self._signals.received
        else:
            self._agree(step)

    def watched(self, batches: Iterable[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
        """The batches of an evaluation, of which every rank has as many.

        Raises:
            BrokenOffError: on all ranks before the same batch, about a second after a signal.
        """
        began, then = time.perf_counter(), 1
        for number, batch in enumerate(batches):
            if self._alone:
                self.signal = self._signals.received
            elif number >= then:
                rate = number / max(1e-6, time.perf_counter() - began)
                told = [float(self._signals.received), rate]
                signal, rate = self._comm.reduce_values(told, op="max")
                self.signal = int(signal)
                then = number + max(1, min(1000, int(rate)))
            if self.signal:
                raise BrokenOffError
            yield batch

    def _late(self) -> bool:
        return self._deadline is not None and time.perf_counter() >= self._deadline

    def _agree(self, step: int) -> bool:
        now = time.perf_counter()
        before, then = self._last
        rate = (step - before) / max(1e-6, now - then)
        stop = float(self._wanted or self._late())
        signal, stop, rate = self._comm.reduce_values(
            [float(self._signals.received), stop, rate], op="max"
        )
        self._last = (step, now)
        self._next = step + max(1, min(1000, int(rate)))
        self.signal = int(signal)
        return bool(stop or signal)
