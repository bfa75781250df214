"""Scripts of the Trainer's whose arguments have defaults of their own, or are others' classes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.translate.launch import trainer_arguments
from torsh_trainer.translate.launch.flags import StatedFlag
from torsh_trainer.translate.launch.job import LaunchJob
from torsh_trainer.translate.python.arguments import read_words
from torsh_trainer.translate.python.dataclass_arguments import DECLARED, DataclassField
from torsh_trainer.translate.python.parsing import parse, read_source
from torsh_trainer.translate.python.project import ScriptProject
from torsh_trainer.translate.python.torch_calls import TorchWalk
from torsh_trainer.translate.python.values import is_plain
from torsh_trainer.translate.shell.words import Word

_OTHERS = (
    "its arguments are a {}, whose defaults may be others than the Trainer's: state in the line "
    "what it leaves out"
)


class ScriptDefaults(NamedTuple):
    """Arguments that the script's own classes state, and what is to be told beside them.

    ``was_read`` is whether such classes were found.
    """

    said: tuple[StatedFlag, ...] = ()
    notes: tuple[str, ...] = ()
    was_read: bool = False


def read_script_defaults(job: LaunchJob, script: Path | None) -> ScriptDefaults:
    """What the script's ``TrainingArguments`` say where the line says nothing."""
    if script is None or job.family != "hugging-face":
        return ScriptDefaults()
    try:
        tree = parse(read_source(script), name=str(script))
        project = ScriptProject(script)
        words = read_words([word.text for word in job.line.arguments])
        walk = TorchWalk(words, {}, project.find_module, project.find_file)
        reading = walk.read(tree, name=str(script), script=script)
    except (ConfigError, ResourceError):
        return ScriptDefaults()
    given = {said.name for said in job.arguments}
    said: list[StatedFlag] = []
    notes: list[str] = []
    declared = reading.all(DECLARED)
    for event in declared:
        notes += [_OTHERS.format(dotted) for dotted in event.facts["others"]]
        for field in event.facts["fields"]:
            if field.name in given or f"--{field.name}" not in trainer_arguments.TABLE:
                continue
            if field.is_own and is_plain(field.default) and field.default is not None:
                said.append(_flag_of(field, script))
            elif field.is_own and field.default is not None:
                where = f"{field.file or script.name}:{field.place.line}"
                notes.append(f"{where}: the script computes {field.name}: state it in the line")
    return ScriptDefaults(tuple(said), tuple(dict.fromkeys(notes)), was_read=bool(declared))


def _flag_of(field: DataclassField, script: Path) -> StatedFlag:
    value = field.default
    items = value if isinstance(value, list | tuple) else [value]
    texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
    words = tuple(Word(text, field.place) for text in texts)
    return StatedFlag(field.name, words, field.place, file=field.file or script.name)
