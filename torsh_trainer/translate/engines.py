"""Which engine a source is for, and what translates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest, Translator
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.python.strangers import explain_script
from torsh_trainer.utils import registry


@dataclass(frozen=True)
class EngineSource:
    """A source with the translator of its engine."""

    translator: Translator
    source: str | Path
    asked: TranslationRequest

    def translate(self) -> Plan:
        """See ``Translator.translate``."""
        return self.translator.translate(self.source, self.asked)

    def translate_jobs(self) -> tuple[Plan, ...]:
        """See ``Translator.translate_jobs``."""
        return self.translator.translate_jobs(self.source, self.asked)

    def content(self) -> dict[str, Any]:
        """See ``Translator.content``."""
        return self.translator.content(self.source, self.asked)


def find_translators() -> list[Translator]:
    """Ours and those of plugins, in the order in which they are asked."""
    found: list[Translator] = [
        kind() for kind in registry.TRANSLATORS.load_all(strict=False).values()
    ]
    return sorted(found, key=lambda translator: (-translator.priority, translator.name))


def work_of(source: str | Path, asked: TranslationRequest) -> EngineSource:
    """The translation that is asked for; an empty ``source`` is ``asked.command`` alone.

    Raises:
        ConfigError: nothing here knows such a file.
        ResourceError: it cannot be read.
    """
    return EngineSource(translator_of(source, asked.command), source, asked)


def translator_of(source: str | Path, command: str | None = None) -> Translator:
    """Who translates a source.

    Raises:
        ConfigError: nothing here knows such a file.
        ResourceError: it cannot be read.
    """
    translators = find_translators()
    for translator in translators:
        if translator.recognises(Path(source), command):
            return translator
    stranger = explain_script(Path(source)) if source else None
    if stranger is not None:
        raise stranger
    raise ConfigError(
        f"{source} is nothing that translate knows", fix=f"it reads {_list_sources(translators)}"
    )


def _list_sources(translators: Sequence[Translator]) -> str:
    return "; ".join(translator.reads for translator in reversed(translators))
