"""The losses since the last report, on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LossMeter:
    """The losses since the last report, each times what it weighs; this rank's.

    ``add`` takes what steps leave on the device, ``read`` waits for all of it at once. ``weight``
    is what the steps weigh together; ``total`` is the sum of what was read before, such as for a
    checkpoint, and ``pending`` what was not, by step.
    """

    def __init__(self) -> None:
        self.pending: list[Sequence[tuple[Tensor, float]]] = []
        self.total = 0.0
        self.weight = 0.0

    def add(self, parts: Sequence[tuple[Tensor, float]], weight: float) -> None:
        """A step is done: ``parts`` are its losses, of one element, and what each weighs.

        ``weight`` is what the step weighs in the mean: that of its parts, or of all ranks' parts.
        """
        self.pending.append(parts)
        self.weight += weight

    def read(self, *beside: Tensor) -> list[float]:
        """The sum of losses times weights, and the numbers of the 0-dim tensors ``beside``."""
        parts = [part for step_parts in self.pending for part in step_parts]
        # Term by term: Python's own sum() rounds otherwise when a save comes between.
        total = self.total
        numbers = read_numbers([*(loss for loss, _ in parts), *beside])
        for value, (_, weight) in zip(numbers, parts, strict=False):
            if weight:  # a filler's loss may be 0/0; it weighs nothing
                total += value * weight
        return [total, *numbers[len(parts) :]]

    def collect(self) -> None:
        """Reads what is pending into ``total``, which a state can hold."""
        if self.pending:
            (self.total,) = self.read()
            self.pending.clear()

    def clear(self) -> None:
        """A report has been made: begins anew."""
        self.pending.clear()
        self.weight = self.total = 0.0


def read_numbers(values: Sequence[Tensor]) -> list[float]:
    """The numbers of tensors of one element; from an accelerator all at once."""
    if not values:
        return []
    if values[0].device.type == "cpu" or len({value.device for value in values}) > 1:
        return [value.item() for value in values]
    numbers: list[float] = torch.stack([value.reshape(()) for value in values]).tolist()
    return numbers
