"""Horovod's exceptions."""

from __future__ import annotations

from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


class HorovodInternalError(RuntimeError):
    """A collective failed; elastic training goes back to its last commit."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed; under drop-in they never do."""

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync
