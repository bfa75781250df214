"""What a collective that is under way gives back: torch's ``Work``."""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from mpi4py import MPI
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

_SPIN_S = 50e-6
"""How long a wait for a message polls without sleeping: as long as a small message may take."""
_NAPS_S = (20e-6, 200e-6)


class LaneWork(Work):
    """A collective in a lane; ``finish`` is called once, from whichever thread did it.

    ``watched`` is called before the first future is given away, ``late`` makes the error of a wait
    whose limit in seconds is over.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        watched: Callable[[], None],
        late: Callable[[float], Exception],
    ) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._watched = watched
        self._late = late
        self._open = _thread.allocate_lock()  # held until the work is done
        self._open.acquire()
        self._guard = _thread.allocate_lock()
        self._done = False
        self._error: Exception | None = None
        self._future: Future[Any] | None = None
        self._promise: Future[Any] | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Wakes whoever waits; a second call has no effect."""
        with self._guard:
            if self._done:
                return
            self._error, self._done = error, True
            promise = self._promise
        self._open.release()
        if promise is not None:
            promise.set_result(self._tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._done:
            limit_s = timeout.total_seconds()
            if not self._open.acquire(timeout=limit_s if limit_s > 0 else -1):
                raise self._late(limit_s)
            self._open.release()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Future[Any]:
        """A future of the tensors; it fails with this work's error.

        The error is raised in a callback, which is the one way to make a future fail for readers
        in C++ (DDP's reducer) as well.
        """
        self._watched()
        with self._guard:
            if self._future is None:
                self._promise = Future()
                self._future = self._promise.then(self._outcome)
                done = self._done
            else:
                done = False
        if done and self._promise is not None:
            self._promise.set_result(self._tensors)
        return self._future

    def _outcome(self, _: Future[Any]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


class Finished(Work):
    """A collective that ended before it was given back."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future


class MessageWork(Work):
    """A message under way; MPI moves it while somebody waits here, or in the background."""

    def __init__(
        self,
        request: MPI.Request,
        tensor: Tensor,
        *,
        timeout_s: float,
        finish: Callable[[], None],
        failed: Callable[[Exception], Exception],
        late: Callable[[float], Exception],
    ) -> None:
        super().__init__()
        self._request = request
        self._status = MPI.Status()
        self._tensor = tensor  # lives as long as MPI may touch it
        self._timeout_s = timeout_s
        self._finish = finish
        self._failed = failed
        self._late = late
        self._done = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        began_s = time.monotonic()
        limit_s = timeout.total_seconds() if timeout > timedelta(0) else self._timeout_s
        nap_s = _NAPS_S[0]
        while not self.is_completed():
            waited_s = time.monotonic() - began_s
            if waited_s > limit_s:
                raise self._late(limit_s)
            if waited_s > _SPIN_S:
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _NAPS_S[1])
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self._done:
            try:
                self._done = self._request.Test(self._status)
            except MPI.Exception as error:
                self._done, self._error = True, self._failed(error)
            else:
                if self._done:
                    self._finish()
        return self._done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return [self._tensor]

    def source_rank(self) -> int:
        """Who sent what was received."""
        return self._status.Get_source()

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        self.wait()
        return Finished([self._tensor]).get_future()
