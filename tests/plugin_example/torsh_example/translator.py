"""Configuration of an imaginary trainer, "acme": lines ``key = value`` in a file ``*.acme``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest, Translator
from torsh_trainer.translate.outcomes import Outcome, dead, exact, refuse
from torsh_trainer.translate.plan import Finding, Ledger, Plan
from torsh_trainer.translate.reading import text_of


class AcmeTranslator(Translator):
    """Every key of a file ``*.acme``."""

    name = "acme"
    title = "ACME"
    reads = "ACME's files *.acme"

    def recognises(self, source: Path, command: str | None) -> bool:
        return command is None and source.suffix == ".acme" and source.is_file()

    def translate(self, source: str | Path, asked: TranslationRequest) -> Plan:
        choices: dict[str, str] = {"precision": "fp32", "strategy": "ddp"}
        values: dict[str, Any] = {}
        ledger = Ledger()
        for number, key, text in _lines(Path(source)):
            ledger.enter(key, text, line=number, column=1)
            outcome = _outcome(key, text)
            values.update(outcome.values)
            ledger.take([_finding(key, text, number, outcome)])
        return Plan(
            source=str(source),
            engine=self.name,
            version="1",
            context=asked.context,
            mode=asked.mode,
            world_size=asked.world_size,
            choices=choices,
            values=values,
            findings=ledger.close(),
        )


def _outcome(key: str, text: str) -> Outcome:
    """The rules: one for every key that ACME knows."""
    if key == "rate":
        return exact("the learning rate", optimizer__lr=float(text))
    if key == "batch":
        return exact("samples a step, over all processes", data__batch_size=int(text))
    if key == "title":
        return dead("ACME prints it and does nothing else with it")
    return refuse("nothing here does the same")


def _finding(key: str, text: str, line: int, outcome: Outcome) -> Finding:
    return Finding(key, text, line, 1, outcome.verdict, outcome.said, outcome.why, f"acme.{key}")


def _lines(path: Path) -> Iterator[tuple[int, str, str]]:
    known = ("rate", "batch", "title", "warp")
    for number, line in enumerate(text_of(path).splitlines(), start=1):
        key, equals, value = (part.strip() for part in line.partition("="))
        if not line.strip():
            continue
        if not equals or key not in known:
            raise ConfigError(
                f"{path}:{number}: {line.strip()!r} is no setting of ACME",
                fix=f"a line is KEY = VALUE, with one of {', '.join(known)}",
            )
        yield number, key, value
