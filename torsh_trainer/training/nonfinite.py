"""Numbers that are not finite: found, named, and the end of a run where that is asked for."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from torsh_trainer.checkpoint.finite import first_nonfinite
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import TrainingError
from torsh_trainer.strategies.base import Engine
from torsh_trainer.training.loss_meter import LossMeter, read_numbers

log = logging.getLogger(__name__)

SKIPPED_IN_A_ROW = 100
"""So many skipped steps mean that training no longer happens."""

_FIX = "lower optimizer.lr, set trainer.max_grad_norm, or trainer.on_nonfinite=skip"


class NonfiniteGuard:
    """Looks at losses and weights as ``trainer.on_nonfinite`` asks for.

    ``comm`` are all processes: what one of them sees ends the run on all. ``skipped_in_a_row`` are
    the steps just now whose update was skipped; the loop sets it back to 0.
    """

    def __init__(
        self, action: Literal["stop", "skip", "continue"], engine: Engine, comm: Communicator
    ) -> None:
        self.skipped_in_a_row = 0
        self._action = action
        self._engine = engine
        self._comm = comm

    def count_skipped(self, step: int) -> None:
        """The update of ``step`` was skipped.

        Raises:
            TrainingError: so were too many before it.
        """
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"{SKIPPED_IN_A_ROW} steps in a row had gradients that are not finite, "
                f"up to step {step}",
                fix="lower optimizer.lr, set trainer.max_grad_norm, or look at the data",
                step=step,
            )

    def check_mean(self, mean: float, losses: LossMeter, *, update: int) -> None:
        """Looks at the ``mean`` of ``losses``, the last of which is that of ``update``; collective.

        Raises:
            TrainingError: it is not finite, and that is to stop the run; names the first step.
        """
        if not math.isfinite(mean) and self._action == "stop":
            self._stop(mean, losses, update)

    def check_pending(self, losses: LossMeter, *, update: int) -> None:
        """Looks at the losses that nobody has read, before what is broken is saved; collective.

        Raises:
            TrainingError: one is not finite, and that is to stop the run.
        """
        if self._action == "stop":
            numbers = read_numbers([loss for parts in losses.pending for loss, _ in parts])
            weights = [weight for parts in losses.pending for _, weight in parts]
            broken = any(w and not math.isfinite(v) for v, w in zip(numbers, weights, strict=True))
            if self._comm.reduce_values([float(broken)])[0]:
                self._stop(math.nan, losses, update)

    def _stop(self, mean: float, losses: LossMeter, update: int) -> None:
        first, bad = update - len(losses.pending) + 1, math.inf
        for i, parts in enumerate(losses.pending):
            if any(weight and not bool(torch.isfinite(loss)) for loss, weight in parts):
                bad = float(first + i)
                break
        step = self._comm.reduce_values([bad], op="min")[0]
        where = f"at step {int(step)}" if math.isfinite(step) else "in their sum"
        raise TrainingError(
            f"the loss is not finite ({mean}), first {where}",
            fix=_FIX,
            step=step,
        )

    def check_end(self, step: int) -> None:
        """Looks at the weights that a run ends with and does not save; see ``check_weights``."""
        if self._action != "continue":
            self.check_weights(step)

    def check_update(self, step: int) -> None:
        """After a step whose gradients were not finite, unless it was skipped."""
        if self._action == "stop" and not self.skipped_in_a_row:
            self.check_weights(step)

    def check_weights(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Finds what a finite loss does not tell: its gradient was not, and the weights are not.

        ``state`` is the engine's after ``step``, where it is known. Collective.

        Raises:
            TrainingError: a weight that trains is not finite.
        """
        model = (self._engine.state_dict() if state is None else state)["model"]
        trained = [n for n, p in self._engine.model.named_parameters() if p.requires_grad]
        name = first_nonfinite(model, trained, self._comm)
        if name is None:
            return
        what = f"the weights are not finite after step {step}, first {name}"
        if self._action == "continue":
            log.warning("%s", what)
            return
        raise TrainingError(what, fix=_FIX, step=step, parameter=name)
