"""Which of a user's files are DeepSpeed's: configurations, alone or in others, and scripts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError, Unsupported
from torsh_trainer.translate import yaml_places
from torsh_trainer.translate.base import TranslationRequest, Translator
from torsh_trainer.translate.deepspeed import keys, versions
from torsh_trainer.translate.deepspeed.script.engines import is_deepspeed_script
from torsh_trainer.translate.deepspeed.script.planning import (
    ScriptRequest,
    plan_script,
)
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import fill, translate
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.python.parsing import read_source
from torsh_trainer.translate.reading import NEOX_MARKS, exists, read, text_of

_ENDINGS = (".json", ".hjson", ".yaml", ".yml", "")
"""Endings of files that are DeepSpeed's where nothing says otherwise."""
_SURE = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
        "zero_force_ds_cpu_optimizer",
    ]
)
"""Keys that no other engine's file has at its top."""
_BRACE = re.compile(r"\s*[{\[]|\s*(#|//|/\*)")


class DeepSpeedTranslator(Translator):
    """A configuration of DeepSpeed, alone or in a file of Accelerate's or GPT-NeoX's."""

    name = "deepspeed"
    title = "DeepSpeed"
    reads = (
        "DeepSpeed's JSON, Accelerate's and GPT-NeoX's YAML, a Python script that calls "
        "deepspeed.initialize"
    )
    priority = 10
    original = "torsh_trainer_deepspeed.original"

    def recognises(self, source: Path, command: str | None) -> bool:
        if command is not None:
            return False
        if not exists(source) or source.is_dir() or source.suffix.lower() == ".json":
            return True  # base64, or whoever reads it says what is wrong
        if _is_python(source):
            return "deepspeed" in read_source(source)
        text = text_of(source)
        if source.suffix.lower() not in _ENDINGS and not _BRACE.match(text):
            return False
        return source.suffix.lower() not in (".yaml", ".yml") or not _is_foreign(source, text)

    def identifies(self, source: Path) -> bool:
        if _is_python(source):
            return is_deepspeed_script(read_source(source))
        if source.suffix.lower() not in _ENDINGS or not source.suffix:
            return False
        try:
            document = read(source)
        except (ConfigError, ResourceError):
            return False
        return document.dialect != "deepspeed" or bool(_SURE & set(document.root.value))

    def translate(self, source: str | Path, asked: TranslationRequest) -> Plan:
        options = _make_options(asked)
        if _is_python(source):
            request = ScriptRequest({}, options.settings, options)
            return plan_script(Path(source), request).plan
        return translate(source, options)

    def content(self, source: str | Path, asked: TranslationRequest) -> dict[str, Any]:
        if _is_python(source):
            raise Unsupported(
                f"verify --source trains what a configuration says, and {source} is a script",
                fix="name its configuration file",
            )
        return fill(source, _make_options(asked))

    def adapt_to_trial(self, asked: TranslationRequest, *, processes: int) -> TranslationRequest:
        # A file of Accelerate's may name more than there is room for.
        return replace(asked, world_size=asked.world_size or processes)


def _is_python(source: str | Path) -> bool:
    return str(source).lower().endswith((".py", ".ipynb")) and exists(Path(source))


def _make_options(asked: TranslationRequest) -> Options:
    return Options(
        asked.world_size,
        versions.parse(asked.version),
        asked.context,
        asked.mode,
        asked.lenient,
        asked.settings or {},
    )


def _is_foreign(path: Path, text: str) -> bool:
    """YAML in which nothing is DeepSpeed's, nor Accelerate's or GPT-NeoX's."""
    try:
        found = set(yaml_places.parse(text, name=str(path)).value)
    except ConfigError:
        return False  # whoever reads it next says what is wrong
    known = {key[0] for key in (*keys.schema(), *keys.ALIASES)} | {"deepspeed_config"}
    marks = {key.replace("-", "_") for key in found} & NEOX_MARKS
    return bool(found) and not (known & found) and not marks
