"""What a rule for Horovod is, and the table of all rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torsh_trainer.translate.horovod.job import HorovodJob, Leaf
from torsh_trainer.translate.outcomes import Outcome
from torsh_trainer.translate.plan import Verdict

Apply = Callable[[HorovodJob, Leaf], Outcome]


@dataclass(frozen=True)
class Rule:
    """``doc`` in one line."""

    id: str
    doc: str
    apply: Apply


RULES: dict[str, Rule] = {}
"""Id -> rule."""


def rule(name: str, doc: str) -> Callable[[Apply], Apply]:
    """Enters the decorated function into the table as the rule ``name``."""

    def enter(apply: Apply) -> Apply:
        assert name not in RULES, name
        RULES[name] = Rule(name, doc, apply)
        return apply

    return enter


def fixed_rule(name: str, verdict: Verdict, why: str, *, engine_takes: bool = True) -> None:
    """A rule whose verdict hangs on nothing; its reason is its line."""

    def apply(job: HorovodJob, leaf: Leaf) -> Outcome:
        return Outcome(verdict, why, engine_takes=engine_takes)

    rule(name, why)(apply)
