"""Habits that DeepSpeed and Horovod have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_trainer.emulation.base import Emulation, Refuse


@dataclass(frozen=True)
class PhantomStep(Emulation):
    """Before the first step one of every optimizer with gradients of zero, at the rate ``lr``.

    DeepSpeed's stage 0 in bf16 takes it to make its optimizer's state, Horovod's
    ``broadcast_optimizer_state`` to have state to send. Adam counts it, and weights decay by it.
    Without ``keeps_state`` what is left is what it did to the weights.
    """

    lr: float
    keeps_state: bool = True

    @property
    def option(self) -> str:  # type: ignore[override]
        """The knob, as the user wrote it."""
        return f"trainer.phantom_lr={self.lr}"

    @torch.no_grad()
    def begin(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Sequence[nn.Parameter],
        *,
        forget: Callable[[Optimizer], None],
    ) -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers:
            kept = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = self.lr
            optimizer.step()
            for group, own in zip(optimizer.param_groups, kept, strict=True):
                group["lr"] = own
            if not self.keeps_state:
                forget(optimizer)
        for parameter in parameters:
            parameter.grad = None


@dataclass(frozen=True)
class ZeroUnused(Emulation):
    """Parameters that no loss of a step reaches have gradients of zero.

    So they decay, and their momentum goes on.
    """

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def check_backward(self, refuse: Refuse, *, manual: bool) -> None:
        if manual:
            raise refuse(
                "strategy.zero_unused=true under manual optimization",
                use="leave it out: the task itself has the gradients",
            )
