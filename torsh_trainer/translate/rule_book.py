"""The rules for one engine: what each says of a key, entered by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torsh_trainer.translate.deepspeed.versions import NEWEST, Version
from torsh_trainer.translate.outcomes import Outcome, dead, refuse
from torsh_trainer.translate.plan import Verdict


class Valued(Protocol):
    """A key of a job, with its value."""

    @property
    def value(self) -> Any:
        """As the job says it."""


JobT = TypeVar("JobT")
LeafT = TypeVar("LeafT", bound=Valued)
Apply = Callable[[JobT, LeafT], Outcome]

_OFF = dead("off")


@dataclass(frozen=True)
class Rule(Generic[JobT, LeafT]):
    """``doc`` in one line; it holds from version ``since`` to ``until``, both included."""

    id: str
    doc: str
    apply: Apply[JobT, LeafT]
    since: Version = (0,)
    until: Version = NEWEST

    def holds(self, version: Version) -> bool:
        """The rule speaks of this version."""
        return self.since <= version <= self.until


@dataclass
class RuleBook(Generic[JobT, LeafT]):
    """All rules for an engine, by id."""

    rules: dict[str, Rule[JobT, LeafT]] = field(default_factory=dict)

    def rule(
        self, name: str, doc: str, *, since: Version = (0,), until: Version = NEWEST
    ) -> Callable[[Apply[JobT, LeafT]], Apply[JobT, LeafT]]:
        """Enters the decorated function as the rule ``name``."""

        def enter(apply: Apply[JobT, LeafT]) -> Apply[JobT, LeafT]:
            assert name not in self.rules, name
            self.rules[name] = Rule(name, doc, apply, since, until)
            return apply

        return enter

    def constant_rule(self, name: str, doc: str, outcome: Outcome) -> None:
        """A rule whose outcome hangs on nothing."""
        self.rule(name, doc)(lambda job, leaf: outcome)

    def fixed_rule(
        self, name: str, verdict: Verdict, why: str, *, engine_takes: bool = True
    ) -> None:
        """A rule whose verdict hangs on nothing; its reason is its line."""
        self.constant_rule(name, why, Outcome(verdict, why, engine_takes=engine_takes))

    def switch_rule(self, name: str, doc: str, *, on: Outcome, off: Outcome = _OFF) -> None:
        """A rule for a switch, or for a number of which 0 is off."""
        self.rule(name, doc)(lambda job, leaf: on if leaf.value else off)

    def refuse_unless(self, name: str, neutral: tuple[Any, ...], why: str) -> None:
        """A rule for a feature that this release does not have: only its neutral values pass."""
        on = refuse(f"not in this release: {why}")
        self.rule(name, why)(lambda job, leaf: _OFF if leaf.value in neutral else on)
