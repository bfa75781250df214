"""Elastic training on processes that stay: commits, and the way back to the last one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torsh_trainer.dropin.horovod.common.exceptions import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
)
from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.session import session

__getattr__ = refuse_unknown(__name__)


class State:
    """What training goes back to after a failure, and takes from rank 0 at its start."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """What is called after a reset."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """What a reset does."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts do not change here."""

    def commit(self) -> None:
        """Keeps the state as it is now, to go back to."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Nothing: hosts do not change here."""
        session.check_on()

    def save(self) -> None:
        """Keeps the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """What follows a reset, before the state is taken from rank 0."""


class ObjectState(State):
    """Plain values, each an attribute."""

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """``func(state, ...)``, which begins anew from the last commit when a collective fails."""

    @functools.wraps(func)
    def run_again(state: Any, *args: Any, **kwargs: Any) -> Any:
        _say_once()
        is_synchronized = False
        while True:
            try:
                if not is_synchronized:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                print(f"drop-in: back to the last commit, after: {error}", file=sys.stderr)
                state.restore()
                is_synchronized = False
            except HostsUpdatedInterrupt as interrupt:
                is_synchronized = interrupt.skip_sync
            reset()
            state.on_reset()

    return run_again


@functools.cache
def _say_once() -> None:
    if session.comm.rank == 0:
        count = session.comm.size
        print(
            f"drop-in: hvd.elastic on {count} processes that stay: hosts do not change, and a "
            "process that dies ends the job",
            file=sys.stderr,
            flush=True,
        )
