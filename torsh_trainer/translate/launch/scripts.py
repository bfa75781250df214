"""Scripts that make an engine of their own: what a launch line starts, read with its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.deepspeed import versions as deepspeed_versions
from torsh_trainer.translate.deepspeed.script.engines import is_deepspeed_script
from torsh_trainer.translate.deepspeed.script.planning import ScriptRequest, plan_script
from torsh_trainer.translate.deepspeed.source import Options as DeepSpeedOptions
from torsh_trainer.translate.horovod import versions as horovod_versions
from torsh_trainer.translate.horovod.job import Options as HorovodOptions
from torsh_trainer.translate.horovod.source import is_horovod_script
from torsh_trainer.translate.horovod.translator import translate_script
from torsh_trainer.translate.plan import ScriptPlan
from torsh_trainer.translate.python.parsing import find_imports, parse
from torsh_trainer.translate.reading import Document


@dataclass(frozen=True)
class LineOfScript:
    """What a launch line says to its script.

    ``words`` are the arguments behind it, ``settings`` what ``--set`` states of the whole job,
    ``document`` the configuration that the line names.
    """

    words: Mapping[str, Any]
    settings: Mapping[str, str]
    world_size: int | None
    asked: TranslationRequest
    document: Document | None = None


class ScriptKind(NamedTuple):
    """Scripts of one engine: how their text is known, and what plans one."""

    engine: str
    is_one: Callable[[str], bool]
    plan: Callable[[Path, LineOfScript], ScriptPlan]


def _plan_deepspeed(script: Path, line: LineOfScript) -> ScriptPlan:
    asked = line.asked
    options = DeepSpeedOptions(
        line.world_size,
        deepspeed_versions.parse(asked.version),
        asked.context,
        asked.mode,
        asked.lenient,
    )
    request = ScriptRequest(line.words, line.settings, options, line.document, is_whole=False)
    return plan_script(script, request)


def _plan_horovod(script: Path, line: LineOfScript) -> ScriptPlan:
    asked = line.asked
    options = HorovodOptions(
        line.world_size,
        horovod_versions.parse(asked.version),
        asked.mode,
        asked.lenient,
        line.settings,
    )
    return translate_script(script, options, line.words)


KINDS = (
    ScriptKind("DeepSpeed", is_deepspeed_script, _plan_deepspeed),
    ScriptKind("Horovod", is_horovod_script, _plan_horovod),
)
"""In the order in which they are asked."""


def find_kind(text: str) -> ScriptKind | None:
    """What reads a script of that text; None where it makes no engine that is known here."""
    return next((kind for kind in KINDS if kind.is_one(text)), None)


def has_trainer(text: str, *, name: str) -> bool:
    """Whether a script imports what makes an engine itself, Hugging Face's Trainer or accelerate;
    what cannot be parsed is taken for one that does."""
    try:
        imported = list(find_imports(parse(text, name=name)))
    except ConfigError:
        return True
    return any(
        one.startswith(("transformers.", "trl.", "accelerate."))
        and one.endswith(("Trainer", "Accelerator"))
        for one in imported
    )
