"""When a fit is over, and how all ranks come to the same answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Interrupted
from torsh_trainer.utils.signals import Signals, signal_name


@dataclass(frozen=True)
class Limits:
    """When a fit is over; None does not bound it."""

    max_steps: int | None = None
    max_epochs: int | None = None
    max_time_s: float | None = None


Watch = Callable[[Iterable[tuple[Any, bool]]], Iterable[tuple[Any, bool]]]
"""Passes the batches of an evaluation on, until it is broken off."""


class StoppedError(Exception):
    """All ranks know of a signal, and leave what they are in the middle of."""


class Stop:
    """Whether all ranks stop after this step, or within an evaluation.

    Signals are caught within ``with stop.signals``; ``signal`` is the number of the one that all
    ranks know of, 0 for none. ``started`` is when the time of ``limits`` began, by
    ``time.perf_counter``.

    One process decides at once. Several agree: after reports and evaluations, where a callback's
    wish must count at once, and besides about once a second, every rank adds what it knows to one
    small reduction, at steps that all of them compute alike.
    """

    def __init__(self, comm: Communicator, limits: Limits, *, started: float) -> None:
        self.signal = 0
        self._comm = comm
        self._alone = comm.world.size == 1
        self._deadline = None if limits.max_time_s is None else started + limits.max_time_s
        self.signals = Signals()
        self._wanted = False
        self._next = 1
        self._last = (0, started)

    def should_stop(self, step: int, wanted: bool, *, meet: bool) -> bool:
        """Whether training ends after ``step``, the same on all ranks.

        ``wanted`` says that a callback of this rank asks for it; ``meet`` that all ranks have just
        met anyway, and may agree again at no price.
        """
        if wanted:
            self._wanted = True
        if self._alone:
            self.signal = self.signals.received
            return self._wanted or self.signal > 0 or (self._deadline is not None and self._late())
        return (meet or step >= self._next) and self._agree(step)

    def meet(self, step: int) -> None:
        """Lets every rank know of a signal, where none has anything left to do."""
        if self._alone:
            self.signal = self.signals.received
        else:
            self._agree(step)

    def watch(self, batches: Iterable[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
        """The batches of an evaluation, of which every rank has as many.

        Raises:
            StoppedError: on all ranks before the same batch, about a second after a signal.
        """
        began, then = time.perf_counter(), 1
        for number, batch in enumerate(batches):
            if self._alone:
                self.signal = self.signals.received
            elif number >= then:
                rate = number / max(1e-6, time.perf_counter() - began)
                mine = [float(self.signals.received), rate]
                signal, rate = self._comm.reduce_values(mine, op="max")
                self.signal = int(signal)
                then = number + max(1, min(1000, int(rate)))
            if self.signal:
                raise StoppedError
            yield batch

    def make_error(self, step: int, *, saves: bool) -> Interrupted:
        """What ends a run that a signal has stopped after ``step``; ``saves`` that it is saved."""
        return Interrupted(
            f"stopped by {signal_name(self.signal)} after step {step}",
            fix="checkpoint.resume=auto in the same run directory goes on from here"
            if saves
            else "nothing was saved: checkpoint.at_end is off",
            signal=self.signal,
            step=step,
        )

    def _late(self) -> bool:
        return self._deadline is not None and time.perf_counter() >= self._deadline

    def _agree(self, step: int) -> bool:
        now = time.perf_counter()
        before, then = self._last
        rate = (step - before) / max(1e-6, now - then)
        stop = float(self._wanted or self._late())
        signal, stop, rate = self._comm.reduce_values(
            [float(self.signals.received), stop, rate], op="max"
        )
        self._last = (step, now)
        self._next = step + max(1, min(1000, int(rate)))
        self.signal = int(signal)
        return bool(stop or signal)
