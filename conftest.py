"""What all tests share, those of plugins too: what is left out of ``make test``, warm interpreters.

``make test`` holds every promise once; the rest of a matrix is ``exhaustive``.

Two kinds of matrix are cut here: a function under ``@pytest.mark.matrix(COUNT)`` keeps so many of
its rows, spread evenly; a contract of strategies says itself which of its rules repeat another.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

pytest_plugins = ("tests.door",)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Marks what ``-m "not exhaustive"`` leaves out."""
    matrices: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            matrices[item.nodeid.partition("[")[0]].append(item)
        elif _repeats_another(item):
            item.add_marker("exhaustive")
    for rows in matrices.values():
        kept = spread_evenly(len(rows), rows[0].get_closest_marker("matrix").args[0])
        for number, row in enumerate(rows):
            if number not in kept:
                row.add_marker("exhaustive")


def spread_evenly(count: int, wanted: int) -> set[int]:
    """So many numbers below ``count``, the first and the last among them."""
    if wanted == 1:
        return {0}
    return {round(i * (count - 1) / (wanted - 1)) for i in range(wanted)}


def _repeats_another(item: Any) -> bool:
    is_exhaustive = getattr(item.cls, "is_exhaustive", None)
    if is_exhaustive is None or "world_size" not in item.fixturenames:
        return False
    return bool(is_exhaustive(item.function, item.callspec.params["world_size"]))


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """The path of a ``python`` that has imported torch (``torsh_trainer.testing.warm_python``)."""
    # Imported late: what needs no torch is tested without it.
    from torsh_trainer.testing.warm_python import WarmPython

    with WarmPython() as python:
        yield python.path


@pytest.fixture
def warm_interpreters(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test starts by ``sys.executable`` starts warm.

    For tests of what programs do, where their start is not the point.
    """
    monkeypatch.setattr(sys, "executable", warm_python)
