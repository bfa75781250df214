"""Which tests belong to ``make test``: every promise once. The rest of a matrix is ``exhaustive``.

Two kinds of matrix are cut here: a function under ``@pytest.mark.matrix(COUNT)`` keeps so many of
its rows, spread evenly; a contract of strategies says itself which of its rules repeat another.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest


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
