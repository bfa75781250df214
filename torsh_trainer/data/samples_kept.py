"""After an interruption: are the training samples those that the run began with?"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sameness import Excerpt, Reader, spread
from torsh_trainer.data.sketch import Sketch
from torsh_trainer.tasks.base import Task

log = logging.getLogger(__name__)

NAME = "data.sketches"
"""Of a run's setup: what ``as_plain`` gave."""

_LARGEST = 1 << 16
"""Characters that all sketches of a run may take in a checkpoint."""


def read_excerpt(task: Task, loading: Loading, *, seed: int) -> Excerpt:
    """Some of the training samples, drawn as in the first epoch; a stream is not read."""
    return Reader(task.data.train, loading, seed, apart=True).excerpt()


def as_plain(excerpt: Excerpt) -> dict[str, Any]:
    """Sketches by the sample's number, as a checkpoint holds them; values to eight digits."""
    found: dict[str, Any] = {}
    if not isinstance(excerpt.size, int):
        return found
    room = _LARGEST
    for number, one in zip(spread(excerpt.size), excerpt.sketches, strict=False):
        if one is None:
            continue
        numbers = [[size, [float(f"{v:.8g}") for v in values]] for size, values in one.numbers]
        room -= len(json.dumps(numbers))
        if room < 0:
            break
        found[str(number)] = {"exact": one.exact, "numbers": numbers}
    return found


def differing_sample(
    saved: Mapping[str, Any], excerpt: Excerpt, task: Task, loading: Loading, *, seed: int
) -> int | None:
    """The number of the first training sample that is another than it was; None where none is.

    A sample that comes out otherwise each time it is read says nothing; the log tells of it.
    """
    if not isinstance(excerpt.size, int):
        return None
    mine = dict(zip(map(str, spread(excerpt.size)), excerpt.sketches, strict=False))
    unsteady = False
    for name, before in saved.items():
        now = mine.get(name)
        if now is None or now.resembles(_sketch(before)):
            continue
        # Twice, since each reading begins with the dataset as it is in this process.
        again = Reader(task.data.train, loading, seed, apart=True).read([int(name)] * 2)
        if all(one is not None and one.resembles(now) for one in again):
            return int(name)
        unsteady = True
    if unsteady:
        log.warning(
            "data.train draws from generators that the run does not seed: its samples come out "
            "otherwise each time, so nobody can tell whether they are those of the checkpoint"
        )
    return None


def _sketch(saved: Mapping[str, Any]) -> Sketch:
    return Sketch(
        str(saved["exact"]),
        tuple((int(size), tuple(map(float, values))) for size, values in saved["numbers"]),
    )
