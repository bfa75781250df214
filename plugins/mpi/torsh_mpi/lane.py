"""The order of a group's collectives: one after the other, in this thread or on the lane's own.

MPI wants every member to make its calls on a communicator in one order. A lane keeps it: a call
that may block runs here at once when nothing is queued, and everything else on the lane's thread,
in the order in which it came. The thread blocks inside MPI, where Python's lock is released, so
that backward goes on beside it.

A second thread stands by where futures are used: a callback may wait for a collective that it
has started itself (PowerSGD's does), and somebody has to make that call meanwhile.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI
from torch import Tensor

from torsh_mpi.work import LaneWork
from torsh_trainer.comm.failures import CommunicationError

THREADS = 2


class Call(NamedTuple):
    """A collective: what it is called, what does it, and the tensors that it leaves behind."""

    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    tensors: Sequence[Tensor] = ()


class Lane:
    """Runs the calls of one group.

    ``current`` names the call that is being made, the ``number``-th since the lane exists, and
    ``direct`` says that it is made in the thread that waits for it. ``explain`` makes an error of
    ours from the name of a call and one of MPI's. After a failure every further call fails with
    the same error: nobody knows what the other members have done.
    """

    def __init__(self, name: str, explain: Callable[[str, Exception], Exception]) -> None:
        self.current: str | None = None
        self.number = 0
        self.direct = False
        self.failure: Exception | None = None
        self._explain = explain
        self._name = name
        self._order = _thread.allocate_lock()
        self._queue: queue.SimpleQueue[tuple[Call, LaneWork] | None] = queue.SimpleQueue()
        self._turn = _thread.allocate_lock()  # whoever has it makes the next call
        self._threads: list[threading.Thread] = []
        self._outstanding: deque[LaneWork] = deque()
        self._submitted = 0
        self._finished = 0  # written by the thread alone

    def run(self, call: Call) -> None:
        """Returns when the call is done.

        Raises:
            CommunicationError: it failed, or one before it did.
        """
        if self.enter(call.name):
            try:
                call.function(*call.arguments)
            except MPI.Exception as error:
                raise self.explain_failure(call.name, error) from error
            finally:
                self.leave()
            return
        with self._order:
            work = self._enqueue(call)
        work.wait()

    def enter(self, name: str) -> bool:
        """Takes the lane for a call in this thread, to be followed by ``leave``.

        False when something is under way, or has failed: then the call has to be queued.
        """
        if not self._order.acquire(blocking=False):
            return False
        if self._submitted != self._finished or self.failure is not None:
            self._order.release()
            return False
        self.number += 1
        self.direct = True
        self.current = name
        return True

    def leave(self) -> None:
        """Ends what ``enter`` began."""
        self.current = None
        self._order.release()

    def explain_failure(self, name: str, error: Exception) -> Exception:
        """The error of a call that MPI has ended with ``error``."""
        if self.failure is None:
            self.failure = self._explain(name, error)
        return self.failure

    def submit(self, call: Call) -> LaneWork:
        """Returns at once; the lane's thread makes the call when its turn has come."""
        with self._order:
            return self._enqueue(call)

    def fail(self, error: Exception) -> None:
        """Ends all that waits, with ``error``; what is inside MPI stays there."""
        if self.failure is None:
            self.failure = error
        for work in list(self._outstanding):
            work.finish(self.failure)

    def close(self) -> None:
        """Lets the thread end once it has done what was submitted."""
        self._queue.put(None)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self.current is None and self._submitted == self._finished

    def _enqueue(self, call: Call) -> LaneWork:
        if not self._threads:
            self._start_thread()
        work = LaneWork(call.tensors, self._stand_by, lambda limit_s: self._late(call, limit_s))
        self._submitted += 1
        self._outstanding.append(work)
        self._queue.put((call, work))
        return work

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _stand_by(self) -> None:
        if len(self._threads) < THREADS:
            self._start_thread()

    def _serve(self) -> None:
        while True:
            error = None
            with self._turn:
                item = self._queue.get()
                if item is None:
                    self._queue.put(None)  # for the other thread
                    return
                call, work = item
                try:
                    self._execute(call)
                except Exception as caught:  # noqa: BLE001 - whoever waits gets it
                    error = caught
                self._outstanding.popleft()
                self._finished += 1
            work.finish(error)
            del item, call, work

    def _execute(self, call: Call) -> None:
        if self.failure is not None:
            raise self.failure
        self.number += 1
        self.direct = False
        self.current = call.name
        try:
            call.function(*call.arguments)
        except MPI.Exception as error:
            raise self.explain_failure(call.name, error) from error
        finally:
            self.current = None

    def _late(self, call: Call, limit_s: float) -> Exception:
        return CommunicationError(
            f"{call.name} did not finish within the {limit_s:g} s that wait() was given",
            fix="give it more time, or see what the other ranks do",
            operation=call.name,
        )
