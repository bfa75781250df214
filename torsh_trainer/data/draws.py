"""What loading needs in the loop and in loader processes alike: seeds, and errors on their way."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from torsh_trainer.errors import TorshError


def seed_draws(seed: int) -> None:
    """Seeds all that a dataset may draw from: torch on the CPU, ``random``, and NumPy's globals."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:  # the legacy generator is what a dataset shares with its libraries
        numpy_seeder()(seed)


@cache
def numpy_seeder() -> Callable[[int], None]:
    """Seeds NumPy's global generator, whichever ``np.random.set_bit_generator`` has put there.

    A function with all it needs at hand: a dataset that draws calls it for every sample.
    """
    import numpy as np  # not everything that seeds has it loaded

    begin, usual = np.random.seed, np.random.MT19937
    in_use = np.random.get_bit_generator  # type: ignore[attr-defined]

    def seed_numpy(seed: int) -> None:
        begin(seed & 0xFFFFFFFF)
        if type(in_use()) is not usual:
            # Of another than MT19937 the second of two normal numbers outlasts the seed.
            state = np.random.get_state(legacy=False)  # noqa: NPY002
            np.random.set_state({**state, "has_gauss": 0, "gauss": 0.0})  # noqa: NPY002

    return seed_numpy


def numpy_bit_generator() -> Any:
    """What NumPy's global generator draws from."""
    import numpy as np

    return np.random.get_bit_generator()  # type: ignore[attr-defined]


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
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        accelerator.init()
        index = accelerator.current_device() if device.index is None else device.index
        generators.append(accelerator.default_generators[index])
    return generators


class Failed:
    """An error of ours on its way out of a loader process.

    Raised there, it would arrive with a traceback inside its sentence.
    """

    def __init__(self, error: TorshError) -> None:
        self.error = error
