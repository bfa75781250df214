"""Whether parameters that are whole on processes that share layers are still the same there.

Their gradients follow from the same numbers by the same operations, so nothing is sent to keep them
alike. An operation that adds in an order of its own (some of CUDA's) would let them drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import TrainingError
from torsh_trainer.strategies.writes import DUE_FORWARDS


class WholeAlike:
    """Compares the bits on all members of ``comm``, after the first step, the second, and then ever
    more rarely."""

    def __init__(
        self, comm: Communicator, held: str = "whole on the processes that share layers (mesh.tp)"
    ) -> None:
        self._comm = comm
        self._held = held
        self._steps = 0

    def check(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Of this process's shards of ``parameters``; collective in the steps that are due.

        Raises:
            TrainingError: names one that differs.
        """
        self._steps += 1
        if self._steps not in DUE_FORWARDS or not parameters:
            return
        sums = [_sum_of_bits(p) for p in parameters.values()]
        told = self._comm.all_gather(self._comm.to_device(torch.stack(sums)))
        differs = torch.stack([one != told[0] for one in told]).any(0)
        if bool(differs.any()):
            name = list(parameters)[int(differs.nonzero()[0])]
            raise TrainingError(
                f"the parameter {name!r} is {self._held}, and no longer the same: its gradient "
                "depends on the order of a sum, or it began with other values",
                fix="set trainer.deterministic=true, or that axis of the mesh to 1",
                parameter=name,
            )


@torch.no_grad()
def _sum_of_bits(parameter: Any) -> Tensor:
    """int64, 0-dim: the sum of the numbers that the bits are."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    bits = local.detach().contiguous().view(-1).view(torch.uint8)
    pad = -bits.numel() % 4
    words = torch.nn.functional.pad(bits, (0, pad)).view(torch.int32)
    return words.sum(dtype=torch.int64)
