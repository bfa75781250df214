"""How long a script trains: the loops around its step, and what may end them sooner."""

from __future__ import annotations

import math
from typing import NamedTuple

from torsh_trainer.translate.outcomes import Outcome, approximate, exact
from torsh_trainer.translate.python.events import Event, ScriptReading

_COUNTED = ("loop.range", "loop.untold", "loop.while")
_LOOPS = (*_COUNTED, "loop.items", "loop.loader", "loop.other")
_UNTOLD = "reading does not tell how many rounds: trainer.max_epochs or trainer.max_steps says it"
_SEVERAL = (
    "it is reached within several loops: trainer.max_epochs or trainer.max_steps says how long"
)
_ELSEWHERE = (
    "the script does not show what calls it: trainer.max_epochs or trainer.max_steps says how long"
)


class Length(NamedTuple):
    """``key`` is what is counted: ``epochs``, or ``steps``; ``value`` how many, or the loop as it
    is written where that cannot be told; ``event`` its outermost loop."""

    key: str
    value: int | str
    event: Event
    outcome: Outcome


def find_length(reading: ScriptReading, step: Event, *, passes: int) -> Length | None:
    """How long a script trains by the loops around its ``step``, which takes so many ``passes``
    through the innermost. None where no loop is around it.

    Rounds over data are epochs; a loop that only counts has so many steps.
    """
    known = {one.loops[-1]: one for what in _LOOPS for one in reading.all(what)}
    loops = [known[loop] for loop in step.loops if loop in known]
    if not loops:
        return None
    over_data = loops[-1].what not in _COUNTED or _counts_data(loops[-1])
    rounds = loops[:-1] if over_data else loops
    key = "epochs" if over_data else "steps"
    if (step.file, step.place) in reading.again:
        return Length(key, loops[0].facts["written"], loops[0], Outcome("yours", _SEVERAL))
    if (step.file, step.place) in reading.uncalled:
        return Length(key, loops[0].facts["written"], loops[0], Outcome("yours", _ELSEWHERE))
    counts = [one.facts.get("count", 0) for one in rounds]
    if not all(count > 0 for count in counts):
        text = next(one.facts["written"] for one in rounds if one.facts.get("count", 0) <= 0)
        return Length(key, text, loops[0], Outcome("yours", _UNTOLD))
    total = math.prod(counts) if over_data else max(1, math.prod(counts) // passes)
    breaks = [one for one in reading.all("loop.break") if one.loops[-1] in step.loops]
    judge = approximate if breaks else exact
    why = "rounds over the data" if over_data else "rounds of a loop that counts"
    why += f", {passes} of them a step" if passes > 1 and not over_data else ""
    why += f", unless line {breaks[0].place.line} ends it sooner" if breaks else ""
    return Length(key, total, loops[0], judge(why, **{f"trainer__max_{key}": total}))


def _counts_data(loop: Event) -> bool:
    """It counts through a data set or a loader, as ``range(len(loader))`` does."""
    return loop.what == "loop.untold" and "len(" in loop.facts["written"]
