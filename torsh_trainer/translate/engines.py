"""Which engine a source is for, and what translates it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate import yaml_places
from torsh_trainer.translate.deepspeed import keys
from torsh_trainer.translate.deepspeed import translator as deepspeed
from torsh_trainer.translate.deepspeed import versions as deepspeed_versions
from torsh_trainer.translate.deepspeed.source import Options as DeepSpeedOptions
from torsh_trainer.translate.horovod import source as horovod_source
from torsh_trainer.translate.horovod import translator as horovod
from torsh_trainer.translate.horovod import versions as horovod_versions
from torsh_trainer.translate.horovod.job import Options as HorovodOptions
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.reading import NEOX_MARKS, exists, text_of

_DEEPSPEED = (".json", ".hjson", ".yaml", ".yml", "")
"""Endings of files that are DeepSpeed's where nothing says otherwise."""
_BRACE = re.compile(r"\s*[{\[]|\s*(#|//|/\*)")


@dataclass(frozen=True)
class Asked:
    """What the command line asks for, whatever the engine."""

    world_size: int | None = None
    version: str = "newest"
    context: str = "raw"
    mode: str = "exact"
    lenient: bool = False
    settings: Mapping[str, str] | None = None
    command: str | None = None


@dataclass(frozen=True)
class Work:
    """A source with its engine: ``translate`` gives the plan, ``original`` what the engine itself
    is given where the source is tried."""

    engine: str
    translate: Callable[[], Plan]
    original: Callable[[], dict[str, Any]]


def work_of(source: str | Path, asked: Asked) -> Work:
    """The translation that is asked for; an empty ``source`` is ``asked.command`` alone.

    Raises:
        ConfigError: nothing here knows such a file, or an option means nothing to its engine.
        ResourceError: it cannot be read.
    """
    settings = asked.settings or {}
    if is_horovod(source, asked.command):
        if asked.context != "raw":
            raise ConfigError(
                f"--context {asked.context} is about DeepSpeed's files", fix="leave it out"
            )
        options = HorovodOptions(
            asked.world_size,
            horovod_versions.parse(asked.version),
            asked.mode,
            asked.lenient,
            settings,
            asked.command,
        )
        return Work(
            "horovod",
            lambda: horovod.translate(source, options),
            lambda: horovod.original(source, options),
        )
    theirs = DeepSpeedOptions(
        asked.world_size,
        deepspeed_versions.parse(asked.version),
        asked.context,
        asked.mode,
        asked.lenient,
        settings,
    )
    return Work(
        "deepspeed",
        lambda: deepspeed.translate(source, theirs),
        lambda: deepspeed.filled(source, theirs),
    )


def is_horovod(source: str | Path, command: str | None = None) -> bool:
    """Whether a source is Horovod's, by its content.

    Raises:
        ConfigError: nothing here knows such a file.
        ResourceError: it cannot be read.
    """
    if command is not None:
        return True
    path = Path(source)
    if not exists(path) or path.is_dir() or path.suffix.lower() == ".json":
        return False
    text = text_of(path)
    if horovod_source.sort_of(path, text) is not None:
        return True
    foreign = path.suffix.lower() not in _DEEPSPEED and not _BRACE.match(text)
    if foreign or (path.suffix.lower() in (".yaml", ".yml") and _is_foreign_yaml(path, text)):
        raise horovod_source.unknown_kind(path)
    return False


def _is_foreign_yaml(path: Path, text: str) -> bool:
    """YAML in which nothing is DeepSpeed's, nor Accelerate's or GPT-NeoX's."""
    try:
        found = set(yaml_places.parse(text, name=str(path)).value)
    except ConfigError:
        return False  # whoever reads it next says what is wrong
    known = {key[0] for key in (*keys.schema(), *keys.ALIASES)} | {"deepspeed_config"}
    marks = {key.replace("-", "_") for key in found} & NEOX_MARKS
    return bool(found) and not (known & found) and not marks
