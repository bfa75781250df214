"""What a rule comes to, whatever the engine: a verdict, why, and what it sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.plan import Verdict


@dataclass(frozen=True)
class Outcome:
    """A verdict, why, and what it sets: options of groups, and values by dotted key."""

    verdict: Verdict
    why: str
    choices: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    becomes: str = ""
    engine_takes: bool = True

    @property
    def said(self) -> str:
        """What it becomes, as the command line would say it."""
        choices = [f"{group}={option}" for group, option in self.choices.items()]
        values = [f"{key}={_text(value)}" for key, value in self.values.items()]
        return self.becomes or " ".join([*choices, *values])


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def exact(why: str, **settings: Any) -> Outcome:
    """The same numbers; ``settings`` with ``__`` for a dot."""
    return Outcome("exact", why, values=dotted_names(settings))


def approximate(why: str, *, engine_takes: bool = True, **settings: Any) -> Outcome:
    """Not the same, as ``why`` says."""
    values = dotted_names(settings)
    return Outcome("approximate", why, values=values, engine_takes=engine_takes)


def faster(why: str, **settings: Any) -> Outcome:
    """Speed and memory alone."""
    return Outcome("performance-only", why, values=dotted_names(settings))


def dead(why: str, *, engine_takes: bool = True) -> Outcome:
    """Nothing comes of it."""
    return Outcome("dead", why, engine_takes=engine_takes)


def refuse(why: str, *, engine_takes: bool = True) -> Outcome:
    """No translation in this release."""
    return Outcome("refused", why, engine_takes=engine_takes)


def dotted_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Names with a dot for each ``__``."""
    return {name.replace("__", "."): value for name, value in settings.items()}
