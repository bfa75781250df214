"""The random number generators of a process, as plain values and tensors of a checkpoint."""

from __future__ import annotations

import importlib
import random
import struct
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

_WORDS = struct.Struct("<625I")


def rng_state(device: torch.device) -> dict[str, Any]:
    """Every stream of this process: torch's on the CPU and on ``device``, Python's, numpy's.

    numpy's global generator is looked at only where something has imported numpy.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": _WORDS.pack(*words), "gauss": gauss},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        held = sys.modules["numpy"].random.get_state(legacy=False)
        if held["bit_generator"] == "MT19937":
            state["numpy"] = {
                "key": held["state"]["key"].astype("<u4").tobytes(),
                "pos": int(held["state"]["pos"]),
                "has_gauss": int(held["has_gauss"]),
                "gauss": float(held["gauss"]),
            }
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Takes back what ``rng_state`` gave; a stream that it does not have is left alone."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "python" in state:
        python = state["python"]
        words = _WORDS.unpack(python["words"])
        random.setstate((python["version"], words, python["gauss"]))
    # The run that was saved used numpy, so this one will: what it draws must not begin anew.
    if "numpy" in state and find_spec("numpy") is not None:
        numpy: Any = importlib.import_module("numpy")
        held = state["numpy"]
        key = numpy.frombuffer(held["key"], dtype="<u4")
        numpy.random.set_state(("MT19937", key, held["pos"], held["has_gauss"], held["gauss"]))
