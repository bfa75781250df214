"""How long a script trains: the loops around the engine's step, and what may end them sooner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torsh_trainer.translate.outcomes import Outcome, approximate, exact
from torsh_trainer.translate.python.events import Event, ScriptReading

LOOPS = ("loop.range", "loop.untold", "loop.while", "loop.loader")
"""Events of loops."""

_UNTOLD = "reading does not tell how many rounds: trainer.max_epochs or trainer.max_steps says it"


def judge_length(
    event: Event, reading: ScriptReading, accumulate: int
) -> Iterator[tuple[str, Any, Outcome]]:
    """(key, value, outcome) for the length of the training, where ``event`` is one of the loops
    around the engine's step. Rounds over data are epochs; a loop that only counts has so many
    steps."""
    steps = reading.all("engine.step")
    around = steps[0].loops if steps else ()
    if not around or event.loops[-1] not in around:
        return
    known = {one.loops[-1]: one for what in LOOPS for one in reading.all(what)}
    innermost = known.get(around[-1])
    over_data = innermost is None or innermost.what == "loop.loader" or _counts_data(innermost)
    if innermost is None and len(around) == 1:
        return
    rounds = [known.get(loop) for loop in (around[:-1] if over_data else around)]
    counts = [one.facts.get("count") if one is not None else None for one in rounds]
    key = "epochs" if over_data else "steps"
    if not all(isinstance(count, int) and count > 0 for count in counts):
        written = [one.facts.get("written") for one in rounds if one is not None]
        text = next((text for text in written if text), "")
        yield key, text, Outcome("yours", _UNTOLD)
        return
    total = math.prod(count for count in counts if count is not None)
    breaks = [one for one in reading.all("loop.break") if one.loops[-1] in around]
    judge: Any = approximate if breaks else exact
    sooner = f", unless line {breaks[0].place.line} ends it sooner" if breaks else ""
    if over_data:
        yield key, total, judge(f"rounds over the data{sooner}", trainer__max_epochs=total)
    else:
        each = f", of {accumulate} micro-batches" if accumulate > 1 else ""
        why = f"rounds of a loop that counts{each}{sooner}"
        yield key, total, judge(why, trainer__max_steps=max(1, total // accumulate))


def _counts_data(loop: Event) -> bool:
    """It counts through a data set or a loader, as ``range(len(loader))`` does."""
    return loop.what == "loop.untold" and "len(" in loop.facts["written"]
