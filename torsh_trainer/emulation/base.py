"""The contract of an emulation: at which moments another engine does something of its own.

By itself it does nothing at any of them, and that is what a run has where nobody asks for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from torsh_trainer.errors import Unsupported


class Refuse(Protocol):
    """``Strategy.refuse``."""

    def __call__(self, option: str, *, use: str) -> Unsupported: ...


class Emulation:
    """Habits of another engine, each at the moment at which that engine has it; here none.

    One is frozen and travels, as knobs do: what it needs of a run it is given.
    """

    option: str = ""
    """What the user has written to ask for a habit that an engine has to take part in."""

    def change_model(self, model: nn.Module) -> None:
        """The model is built, on the host and not wrapped: masters are what this leaves."""

    def begin(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Sequence[nn.Parameter],
        *,
        forget: Callable[[Optimizer], None],
    ) -> None:
        """Before the first step. ``forget`` drops an optimizer's state; gradients are dropped."""

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of a step are there, reduced, and not yet unscaled or clipped."""

    def gradient_scale(self, ranks: int) -> float:
        """How many times the mean the gradient is, where ``ranks`` see other samples."""
        return 1.0

    def check_accumulation(self, accumulate: int) -> None:
        """For a step of so many micro-batches.

        Raises:
            ConfigError: the habit does not divide it.
        """

    def check_backward(self, refuse: Refuse, *, manual: bool) -> None:
        """Before a backward that the caller makes; ``manual``: a task that steps itself makes it.

        Raises:
            Unsupported: the habit has no meaning there.
        """


class Growth:
    """How the scale of a loss grows: as torch.amp.GradScaler's."""

    delay: int = 0
    """Steps by which the first growth after the start and after an overflow comes later."""

    def divisor(self, scale: float, grown: float) -> float:
        """What gradients of a step at which ``scale`` becomes ``grown`` are divided by."""
        return scale


NONE = Emulation()
TORCHS_GROWTH = Growth()


class _Several(Emulation):
    """All habits of ``parts``, in their order."""

    def __init__(self, parts: tuple[Emulation, ...]) -> None:
        self._parts = parts
        self.option = next((part.option for part in parts if part.option), "")

    def change_model(self, model: nn.Module) -> None:
        for part in self._parts:
            part.change_model(model)

    def begin(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Sequence[nn.Parameter],
        *,
        forget: Callable[[Optimizer], None],
    ) -> None:
        for part in self._parts:
            part.begin(optimizers, parameters, forget=forget)

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        for part in self._parts:
            part.complete(parameters)

    def gradient_scale(self, ranks: int) -> float:
        scale = 1.0
        for part in self._parts:
            scale *= part.gradient_scale(ranks)
        return scale

    def check_accumulation(self, accumulate: int) -> None:
        for part in self._parts:
            part.check_accumulation(accumulate)

    def check_backward(self, refuse: Refuse, *, manual: bool) -> None:
        for part in self._parts:
            part.check_backward(refuse, manual=manual)


def combine(*parts: Emulation) -> Emulation:
    """All habits of ``parts``: ``NONE`` where there are none."""
    some = tuple(part for part in parts if type(part) is not Emulation)
    if not some:
        return NONE
    return some[0] if len(some) == 1 else _Several(some)
