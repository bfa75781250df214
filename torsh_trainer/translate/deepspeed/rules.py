"""What a rule is, and the table of all rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torsh_trainer.translate.deepspeed.source import Leaf, Source
from torsh_trainer.translate.deepspeed.versions import NEWEST, Version
from torsh_trainer.translate.outcomes import Outcome as Outcome
from torsh_trainer.translate.outcomes import approximate as approximate
from torsh_trainer.translate.outcomes import dead as dead
from torsh_trainer.translate.outcomes import exact as exact
from torsh_trainer.translate.outcomes import faster as faster
from torsh_trainer.translate.outcomes import refuse as refuse
from torsh_trainer.translate.plan import Verdict

Apply = Callable[[Source, Leaf], Outcome]


@dataclass(frozen=True)
class Rule:
    """``doc`` in one line; it holds from version ``since`` to ``until``, both included."""

    id: str
    doc: str
    apply: Apply
    since: Version = (0,)
    until: Version = NEWEST

    def holds(self, version: Version) -> bool:
        """The rule speaks of this version."""
        return self.since <= version <= self.until


RULES: dict[str, Rule] = {}
"""Id -> rule."""


def rule(
    name: str, doc: str, *, since: Version = (0,), until: Version = NEWEST
) -> Callable[[Apply], Apply]:
    """Enters the decorated function into the table as the rule ``name``."""

    def enter(apply: Apply) -> Apply:
        assert name not in RULES, name
        RULES[name] = Rule(name, doc, apply, since, until)
        return apply

    return enter


def fixed_rule(name: str, verdict: Verdict, why: str) -> None:
    """A rule whose verdict hangs on nothing; its reason is its line."""

    def apply(source: Source, leaf: Leaf) -> Outcome:
        return Outcome(verdict, why)

    rule(name, why)(apply)


def refuse_unless(name: str, neutral: tuple[Any, ...], why: str, *, off: str) -> None:
    """A rule for a feature that this release does not have: only its neutral values pass."""

    def apply(source: Source, leaf: Leaf) -> Outcome:
        if leaf.value in neutral:
            return Outcome("dead", off)
        return Outcome("refused", f"not in this release: {why}")

    rule(name, why)(apply)
