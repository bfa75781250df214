"""The contract of a translator: which sources it knows, and what they come to natively."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torsh_trainer.errors import Unsupported
from torsh_trainer.translate.plan import Plan


@dataclass(frozen=True)
class TranslationRequest:
    """What the command line asks for, whatever the engine.

    ``settings`` are ``--set NAME=VALUE``; ``command`` is the line that starts the job, where one
    was given.
    """

    world_size: int | None = None
    version: str = "newest"
    context: str = "raw"
    mode: str = "exact"
    lenient: bool = False
    settings: Mapping[str, str] | None = None
    command: str | None = None


class Translator(abc.ABC):
    """Translates what one engine reads into native configuration; made without arguments."""

    name: ClassVar[str]
    """Of the engine: ``Plan.engine``."""

    title: ClassVar[str] = ""
    """As its authors write it; empty: ``name``."""

    reads: ClassVar[str]
    """What it reads, for the message about a file that nobody knows."""

    priority: ClassVar[int] = 50
    """The first that recognises a source translates it, from the highest on: launch 30, horovod 20,
    deepspeed, which takes any JSON, 10."""

    original: ClassVar[str] = ""
    """The module with ``Original``, the strategy that trains by the engine itself, for ``verify
    --source``; empty where there is none."""

    @abc.abstractmethod
    def recognises(self, source: Path, command: str | None) -> bool:
        """Whether ``source``, or ``command`` alone, is this engine's, by its content.

        ``source`` may name no file. False for what cannot be read or parsed: whoever translates it
        says what is wrong.
        """

    def identifies(self, source: Path) -> bool:
        """Whether a file that nobody named, one of many in a project, surely is a job or a
        configuration of this engine: stricter than ``recognises``, which it is unless a translator
        says otherwise."""
        return self.recognises(source, None)

    @abc.abstractmethod
    def translate(self, source: str | Path, asked: TranslationRequest) -> Plan:
        """The plan, with a finding for every key of ``source``.

        Raises:
            ConfigError: the source is invalid, with the place and the next move; or ``asked`` wants
                what means nothing to this engine.
            ResourceError: it cannot be read.
        """

    def translate_jobs(self, source: str | Path, asked: TranslationRequest) -> tuple[Plan, ...]:
        """A plan for each job that ``source`` starts: one, unless a translator knows of several.

        Raises:
            ConfigError, ResourceError: as ``translate``.
        """
        return (self.translate(source, asked),)

    def content(self, source: str | Path, asked: TranslationRequest) -> dict[str, Any]:
        """What ``Original`` is given to train as ``source`` says: plain values.

        Raises:
            ConfigError, ResourceError: as ``translate``.
        """
        raise Unsupported(
            f"verify --source trains the original, and nothing here trains under {self.engine}",
            fix="translate the file, and compare runs by hand",
        )

    def adapt_to_trial(self, asked: TranslationRequest, *, processes: int) -> TranslationRequest:
        """How a source is read that is tried on this machine, with room for ``processes``."""
        return asked

    @property
    def engine(self) -> str:
        """The engine as its authors write it."""
        return self.title or self.name
