"""What loading needs in the loop and in loader processes alike: seeds, and errors on their way."""

from __future__ import annotations

import random
import sys

import torch

from torsh_trainer.errors import TorshError


def seed_draws(seed: int) -> None:
    """Seeds all that a dataset may draw from: torch on the CPU, ``random``, and NumPy's globals."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # the legacy generator is what a dataset shares with its libraries
        numpy.random.seed(seed & 0xFFFFFFFF)


def forward_generators(device: torch.device) -> list[torch.Generator]:
    """The generators that a forward on ``device`` draws from."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


class Failed:
    """An error of ours on its way out of a loader process.

    Raised there, it would arrive with a traceback inside its sentence.
    """

    def __init__(self, error: TorshError) -> None:
        self.error = error
