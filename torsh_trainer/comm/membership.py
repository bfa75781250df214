"""Which processes a run consists of: the same from its beginning to its end, or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.start import create
from torsh_trainer.environments.world import World

T = TypeVar("T")
Snapshot = Callable[[], Mapping[str, Any]]
"""Gives all that training goes on from, of all ranks, copied; collective."""


class Membership:
    """The processes of a run: the same ones from its beginning to its end.

    Where processes come and go (``World.elastic``), a strategy brings a membership of its own. A
    run is then made of several attempts, each in other processes; what they have to know of one
    another travels in memory.
    """

    @property
    def kept(self) -> Mapping[str, Any] | None:
        """What this attempt goes on from: what ``keep`` took; None begins as the run says."""
        return None

    @property
    def spent_s(self) -> float:
        """Seconds that earlier attempts have taken."""
        return 0.0

    @property
    def findings(self) -> Mapping[str, Any]:
        """What result.json holds of it."""
        return {}

    def run(self, attempt: Callable[[World], T], world: World) -> T:
        """What ``attempt`` gives; it is called for as many worlds as the run has."""
        return attempt(world)

    def meet(
        self, world: World, options: CommOptions, device: torch.device, *, process_group: bool
    ) -> Communicator:
        """The communicator of ``world``; see ``comm.start.create``."""
        return create(world, options, device, process_group=process_group)

    def home(self, make: Callable[[], Path]) -> Path:
        """The run directory, made once in a run."""
        return make()

    def begin(self) -> None:
        """The log is open, and this attempt begins."""

    def keep(self, step: int, snapshot: Snapshot) -> None:
        """Training goes on after ``step``; collective, as is ``after_step``."""

    def after_step(self, step: int, snapshot: Snapshot) -> None:
        """``step`` is done, with what was due after it. May raise what ``survives`` knows."""

    def survives(self, error: BaseException) -> bool:
        """Whether ``error`` ends an attempt, and not the run."""
        return False
