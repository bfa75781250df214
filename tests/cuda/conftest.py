"""Tests of a real GPU (``-m gpu``), and the form of each that a machine without one runs.

A test that takes ``device`` is collected twice: on the CPU, where gloo stands for NCCL, and on
CUDA, marked ``gpu``. What takes ``device`` and ``ranks`` is collected on one and two CPU processes,
on one GPU, and on two (``gpus(2)``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def what_lacks(count: int) -> str:
    """What is missing here for a test of ``count`` GPUs; empty where nothing is."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    found = torch.cuda.device_count()
    return f"needs {count} GPUs, and there is {found}" if found < count else ""


@pytest.fixture
def lacks() -> Callable[[int], str]:
    """``what_lacks``, for the test of its words."""
    return what_lacks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.fixturenames
    if "device" not in names:
        return
    if "ranks" in names:
        places = [("cpu", 1), ("cpu", 2), ("cuda", 1), ("cuda", 2)]
        params = [pytest.param(*place, marks=_marks(*place)) for place in places]
        metafunc.parametrize(("device", "ranks"), params, ids=[f"{d}-{n}" for d, n in places])
    else:
        params = [pytest.param(kind, marks=_marks(kind, 1)) for kind in ("cpu", "cuda")]
        metafunc.parametrize("device", params, ids=["cpu", "cuda"])


def _marks(device: str, count: int) -> list[Any]:
    if device == "cpu":
        return []
    return [pytest.mark.gpu] if count == 1 else [pytest.mark.gpus(count)]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        several = item.get_closest_marker("gpus")
        if several is not None:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") is not None:
            missing = what_lacks(1 if several is None else several.args[0])
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
