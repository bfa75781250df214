"""``verify --source FILE``: a foreign configuration and what is composed around it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_trainer.config import command_line
from torsh_trainer.config.job import import_paths
from torsh_trainer.config.overrides import bare_key
from torsh_trainer.config.roots import RECIPE
from torsh_trainer.config.verifying import GROUP, OWN, compose_line, text_of
from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.command import request_of
from torsh_trainer.translate.deepspeed.source import CONTEXTS, MODES

FLAG = "--source"
_STRATEGIES = "strategies"


@dataclass(frozen=True)
class Proof:
    """A file that is translated and tried, and the overrides around it."""

    source: Path
    asked: TranslationRequest
    line: command_line.CommandLine

    @property
    def recipe(self) -> str:
        """``+recipe=``; empty where the built-in model is trained."""
        named = [text for text in self.line.overrides if bare_key(text) == RECIPE]
        return named[-1].partition("=")[2] if named else ""

    @property
    def has_task(self) -> bool:
        """The command line names what to train."""
        return bool(self.recipe) or any(bare_key(t) == "task" for t in self.line.overrides)

    @property
    def import_paths(self) -> tuple[str, ...]:
        """Where user code is found."""
        return import_paths(self.line.config_dir)

    def config(self, choices: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
        """The resolved configuration, group ``verify`` included, with a translation in it.

        A group that the translation chooses is the translation's whole, and nothing of what a
        recipe sets there; the user's overrides come last.

        Raises:
            ConfigError: it does not compose.
        """
        recipe = [text for text in self.line.overrides if bare_key(text) == RECIPE]
        user = [text for text in self.line.overrides if bare_key(text) != RECIPE]
        said = [f"{_adding(key)}{key}={text_of(value)}" for key, value in values.items()]

        def is_choice(text: str) -> bool:
            return bare_key(text).partition(".")[0] in choices

        around = [f"+{GROUP}=default", *recipe, *(t for t in [*said, *user] if not is_choice(t))]
        own = [f"{group}={option}" for group, option in choices.items()]
        own += [text for text in [*said, *user] if is_choice(text)]
        config = compose_line(self.line.with_overrides(around))
        translated = compose_line(self.line.with_overrides(own))
        return {**config, **{group: translated[group] for group in choices}}


def _adding(key: str) -> str:
    """``+`` before a key of a mapping that takes what is added to it."""
    return "+" if key.startswith("schedule.options.") else ""


def proof(argv: Sequence[str]) -> Proof:
    """What ``verify --source FILE ...`` asks for.

    Raises:
        ConfigError: an option or an override that means nothing here.
    """
    known, rest = _parser().parse_known_args(list(argv))
    line = command_line.parse(rest)
    if line.multirun or not line.trains or line.dry_run:
        raise ConfigError("verify trains and compares", fix="leave -m, --cfg and --info out")
    for text in line.overrides:
        key = bare_key(text)
        if key == _STRATEGIES:
            raise ConfigError(
                f"{text} beside {FLAG}: the two that are compared are the original and its "
                "translation",
                fix="leave it out; verify +recipe=NAME strategies=[...] compares strategies",
            )
        for name, reason in OWN.items():
            if key == name or key.startswith((f"{name}.", f"{name}/")):
                raise ConfigError(f"{text} means nothing to verify", fix=reason)
    return Proof(
        known.source,
        request_of(known),
        line,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torsh_trainer verify", add_help=False, allow_abbrev=False
    )
    parser.add_argument(FLAG, type=Path, required=True)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--source-version", default="newest")
    parser.add_argument("--context", choices=CONTEXTS, default="raw")
    parser.add_argument("--mode", choices=MODES, default="exact")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--command")
    return parser
