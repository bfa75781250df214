"""Processes of this machine, each behind a command such as ``numactl`` or ``nice``."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torsh_trainer.errors import ConfigError
from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.local import Local
from torsh_trainer.launchers.local_transport import LocalTransport, ProcessSlot
from torsh_trainer.launchers.transport import TransportFactory, WorkerStart


@dataclass(frozen=True)
class Wrapped(Local):
    """As ``local``, with ``wrapper`` before the command of every process that it starts."""

    name = "wrapped"

    wrapper: tuple[str, ...] = ("nice",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.wrapper:
            raise ConfigError("launcher.wrapper is empty", fix="use launcher=local")

    def transport(
        self, *, listener: socket.socket | None, seats: Sequence[ProcessSlot]
    ) -> TransportFactory:
        return partial(WrappedTransport, wrapper=self.wrapper, listener=listener, seats=seats)


class WrappedTransport(LocalTransport):
    """Subprocesses that begin as another command, which becomes the worker (``exec``)."""

    def __init__(
        self,
        payload: Payload,
        *,
        wrapper: Sequence[str],
        listener: socket.socket | None = None,
        seats: Sequence[ProcessSlot] = (),
    ) -> None:
        super().__init__(payload, listener=listener, seats=seats)
        self._wrapper = wrapper

    def command(self, words: Sequence[str], start: WorkerStart) -> list[str]:
        return [*self._wrapper, *words]
