"""Collectives that do not end: who is missing, and how the wait is broken off.

A thread looks at every lane about once a second. A rank that has been inside a collective for a
while leaves a note in the group's store; when the time is up, those without a note are the ones
that are missing. Nothing of this costs a collective anything that ends in time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from torsh_mpi import endings
from torsh_mpi.lane import Lane
from torsh_trainer.comm.failures import CommunicationError

NOTE_S = 1.0
"""A collective that takes longer is noted; at most a quarter of the timeout."""
_TICK_S = 0.5
_WAY_OUT_S = 5.0
"""What a main thread that is no longer held needs at most to raise its error."""


class GroupStatus:
    """What the members of a group tell each other of collectives that take long."""

    def __init__(self, store: Store | None, *, rank: int, ranks: Sequence[int], name: str) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._name = name
        self.global_rank = ranks[rank]

    def note(self, number: int, name: str) -> None:
        """Tells the others that this rank is inside its ``number``-th collective."""
        if self._store is not None:
            self._store.set(f"inside/{self._rank}", json.dumps([number, name]))

    def late(self, number: int, name: str, timeout_s: float) -> CommunicationError:
        """The error of a collective whose time is up, naming the ranks that are not in it."""
        others = self._others()
        missing, elsewhere = [], []
        for member, told in others.items():
            if told is None or told[0] < number:
                missing.append(member)
            elif told != [number, name]:
                elsewhere.append(f"rank {member} is in {told[1]} instead")
        parts = []
        if missing:
            parts.append(f"{_name_ranks(missing)} did not enter it")
        parts += elsewhere
        if not parts:
            parts.append("every rank is in it, so a process or a connection is stuck")
        sentence = (
            f"{name} did not finish within {timeout_s:g} s on rank "
            f"{self.global_rank} (number {number} of group {self._name}): " + "; ".join(parts)
        )
        return self._error(sentence, name, missing)

    def tell(self, error: CommunicationError) -> None:
        """Leaves ``error`` for the members that are broken off because of it."""
        if self._store is not None:
            facts = error.facts
            told = json.dumps([error.sentence, facts["operation"], facts["missing"]])
            with contextlib.suppress(RuntimeError):  # the store went with rank 0's process
                self._store.set("verdict", told)

    def verdict(self) -> CommunicationError | None:
        """What another member found out before it broke everything off."""
        try:
            if self._store is None or not self._store.check(["verdict"]):
                return None
            return self._error(*json.loads(self._store.get("verdict")))
        except RuntimeError:  # the store went with rank 0's process
            return None

    def _error(self, sentence: str, operation: str, missing: list[int]) -> CommunicationError:
        return CommunicationError(
            sentence,
            fix="see the logs of those ranks; comm.timeout_s gives more time",
            rank=self.global_rank,
            operation=operation,
            missing=missing,
        )

    def _others(self) -> dict[int, list[Any] | None]:
        """Global rank -> number and name of what it is in, or None."""
        told: dict[int, list[Any] | None] = {}
        for member, rank in enumerate(self._ranks):
            if member == self._rank:
                continue
            told[rank] = None
            if self._store is not None:
                try:
                    if self._store.check([f"inside/{member}"]):
                        told[rank] = json.loads(self._store.get(f"inside/{member}"))
                except RuntimeError:  # the store went with rank 0's process
                    continue
        return told


class WatchedGroup:
    """One group under watch; ``interrupt`` makes MPI return from what it is in, if it can."""

    def __init__(
        self,
        lane: Lane,
        status: GroupStatus,
        *,
        timeout_s: float,
        interrupt: Callable[[], bool],
    ) -> None:
        self.timeout_s = timeout_s
        self._lane = lane
        self._status = status
        self._interrupt = interrupt
        self._seen = 0
        self._seen_s = 0.0
        self._noted = False

    @property
    def tick_s(self) -> float:
        """How often to look."""
        return min(_TICK_S, self.timeout_s / 8)

    def look(self) -> None:
        """Notes a collective that takes long; ends one that takes too long."""
        number, name, now_s = self._lane.number, self._lane.current, time.monotonic()
        if name is None or self._lane.failure is not None:
            return
        if number != self._seen:
            self._seen, self._seen_s, self._noted = number, now_s, False
            return
        age_s = now_s - self._seen_s
        note_s = min(NOTE_S, self.timeout_s / 4)
        if age_s > note_s and not self._noted:
            self._noted = True
            with contextlib.suppress(RuntimeError):  # the store went with rank 0's process
                self._status.note(number, name)
        # Whoever entered just before the time was up has time to say so.
        if age_s > self.timeout_s + 2 * note_s:
            self._end(number, name)

    def _end(self, number: int, name: str) -> None:
        error = self._status.late(number, name, self.timeout_s)
        if self._lane.number != number or self._lane.current is None:
            return
        self._status.tell(error)
        self._lane.fail(error)
        endings.broke()
        if not self._interrupt() and self._lane.direct and not self._comes_out(number):
            _leave(error)

    def _comes_out(self, number: int) -> bool:
        """Whether the main thread leaves the call after all: another member may have freed it."""
        end_s = time.monotonic() + _WAY_OUT_S
        while time.monotonic() < end_s:
            if self._lane.number != number or self._lane.current is None:
                return True
            time.sleep(0.01)
        return False


_watched: weakref.WeakSet[WatchedGroup] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(group: WatchedGroup) -> None:
    """Looks after ``group`` for as long as it exists."""
    global _thread  # noqa: PLW0603 - one thread a process
    with _lock:
        _watched.add(group)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_serve, name="mpi watch", daemon=True)
            _thread.start()


def _serve() -> None:
    while True:
        with _lock:
            groups = list(_watched)
        for group in groups:
            group.look()
        tick_s = min((group.tick_s for group in groups), default=_TICK_S)
        del groups[:]
        time.sleep(tick_s)


def _leave(error: CommunicationError) -> None:
    """Ends this process: its main thread is inside MPI, and nothing else brings it out."""
    sys.stderr.write(f"{error}\n")
    faulthandler.dump_traceback(file=sys.stderr)
    sys.stderr.flush()
    os._exit(error.exit_code)


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
