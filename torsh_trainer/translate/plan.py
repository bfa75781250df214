"""What a translation comes to: a finding for every key, and the native configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torsh_trainer.translate.python.training import TrainingScript

Verdict = Literal[
    "exact", "emulated", "approximate", "performance-only", "dead", "yours", "refused"
]
"""exact: the same numbers, or a definition. emulated: the same numbers, by a knob made for it.
approximate: numbers or behaviour differ, and ``why`` says how. performance-only: speed and memory.
dead: the source reads it and does nothing. yours: the script's own, which your task takes.
refused: it has no translation in this release."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

EXIT_APPROXIMATE = 10
EXIT_REFUSED = 11
EXIT_ASKS = 13
"""Something is missing that only the user knows."""

RECIPE = "RECIPE.yaml"
"""Stands for the recipe in ``Plan.command``."""


@dataclass(frozen=True)
class Finding:
    """The verdict on one key.

    ``line`` and ``column`` count from 1 and are 0 where the key does not stand in the file: then
    ``value`` is the source's default (``given`` false). ``becomes`` is the native setting, empty
    where there is none. ``engine_takes``: whether the newest known engine itself accepts the key.
    ``file`` is where it stands, where a job is read from several; empty for the source itself.
    ``proved_by`` are the tests that hold the rule, with such a verdict, against the engine.
    """

    key: str
    value: Any
    line: int
    column: int
    verdict: Verdict
    becomes: str
    why: str
    rule: str
    engine_takes: bool = True
    given: bool = True
    file: str = ""
    proved_by: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The line for a table: ``12``, ``train.py:12``, ``default``, or nothing."""
        if not self.given:
            return "default"
        line = str(self.line or "")
        return f"{self.file}:{line}" if self.file else line


@dataclass(frozen=True)
class DTypes:
    """One row of the dtype table: what the source has, what the translation has."""

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Memory:
    """Bytes per parameter and rank, without activations; ``note`` says for which world."""

    before: float
    after: float
    note: str


@dataclass(frozen=True)
class Fact:
    """Something that only the user knows, stated by ``--set NAME=VALUE``.

    ``used`` is where the job needs it, ``look`` where a user finds it out. ``value`` stands for it
    in the command that is to be filled in.
    """

    name: str
    used: str
    look: str
    line: int = 0
    value: str = "VALUE"

    @property
    def leads_on(self) -> bool:
        """More is read once it is known, and may ask for more: a file, a condition, a script."""
        is_condition = self.value in ("true", "false") or "true or false" in self.look
        return is_condition or self.value == "FILE" or self.name == "@"


def note_more(facts: Sequence[Fact]) -> str:
    """Words on facts of which more may follow; empty where this is all."""
    names = [fact.name for fact in facts if fact.leads_on]
    return f"what is read once {', '.join(names)} is known may ask for more" if names else ""


@dataclass(frozen=True)
class Plan:
    """A translation: ``choices`` (group -> option), ``values`` (dotted key -> value), findings.

    ``target`` is ``native``, or the engine and version that a native recipe is translated to.
    ``taken_for`` says what the source was taken for, where it could have been several things;
    ``notes`` what else there is to know. ``facts`` are what is missing: then ``values`` are not all
    of it. ``command`` starts the job, with ``RECIPE.yaml`` for the recipe; ``sweep`` are dotted
    keys with the values that the source tries one after the other. ``files`` are others of the job
    that were found beside the source: its script, its configuration. ``script`` is what was read of
    the script that trains, where there is one.
    """

    source: str
    engine: str
    version: str
    context: str
    mode: str
    world_size: int | None
    choices: Mapping[str, str]
    values: Mapping[str, Any]
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()
    dtypes: tuple[DTypes, ...] = ()
    memory: Memory | None = None
    target: str = "native"
    taken_for: str = ""
    notes: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    command: str = ""
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    script: TrainingScript | None = field(default=None, repr=False, compare=False)

    @property
    def counts(self) -> dict[str, int]:
        """Verdict -> how many findings, all verdicts in their order."""
        found = Counter(finding.verdict for finding in self.findings)
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def exit_code(self) -> int:
        """0 when nothing differs, 10 with something approximate, 11 with something refused, 13
        when facts are missing."""
        counts = self.counts
        if self.facts:
            return EXIT_ASKS
        if counts["refused"]:
            return EXIT_REFUSED
        return EXIT_APPROXIMATE if counts["approximate"] else 0


@dataclass(frozen=True)
class ScriptPlan:
    """The plan of a script, and the arguments and facts of it that the plan hangs on."""

    plan: Plan
    used: frozenset[str]


@dataclass
class Ledger:
    """Sees to it that no key is forgotten: every leaf goes in, every leaf has to come out."""

    open: dict[str, tuple[Any, int, int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def enter(self, key: str, value: Any, *, line: int, column: int) -> None:
        """A leaf key of the source, which now needs a verdict."""
        self.open[key] = (value, line, column)

    def take(self, findings: Iterable[Finding]) -> None:
        """Verdicts; those on keys that were entered close them."""
        for finding in findings:
            self.open.pop(finding.key, None)
            self.findings.append(finding)

    def close(self) -> tuple[Finding, ...]:
        """All findings in the order of the file, then defaults; a forgotten key is refused."""
        for key, (value, line, column) in self.open.items():
            self.findings.append(
                Finding(
                    key,
                    value,
                    line,
                    column,
                    "refused",
                    "",
                    "no rule of this release took this key; please report it",
                    "ledger",
                )
            )
        self.open.clear()
        return tuple(
            sorted(
                self.findings,
                key=lambda f: (not f.given, f.file, f.line, f.column, f.key, f.rule),
            )
        )
