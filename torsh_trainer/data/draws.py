"""What loading needs in the loop and in loader processes alike: seeds, and errors on their way."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

from torsh_trainer.errors import TorshError


def seed_draws(seed: int) -> None:
    """Seeds all that a dataset may draw from: torch on the CPU, ``random``, and NumPy's globals."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # the legacy generator is what a dataset shares with its libraries
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Within the block the same generators begin at ``seed``; after it they are as they were."""
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state(legacy=False)
    seed_draws(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


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
