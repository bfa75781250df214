"""Configurations that a launch line names: where they are, and what they say.

A file is looked up where a user would: as it is written, beside the launch file, and in the folders
above it. Files that the launch file writes itself are read from its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate import yaml_places
from torsh_trainer.translate.deepspeed import auto
from torsh_trainer.translate.launch import accelerate_flags
from torsh_trainer.translate.launch.flags import StatedFlag
from torsh_trainer.translate.launch.job import Asked, LaunchJob, fact_of
from torsh_trainer.translate.nodes import MappingEntry, Node, Place, leaves
from torsh_trainer.translate.plan import Fact
from torsh_trainer.translate.reading import (
    ACCELERATE,
    Document,
    document_of,
    read_text,
    text_of,
)
from torsh_trainer.translate.shell.words import Hole, Word, WrittenFile

NAMES = ("deepspeed", "deepspeed_config", "ds_config", "ds_config_file", "deepspeed_config_file")
"""Arguments of scripts that name a configuration of DeepSpeed."""

_DEEPSPEED = NAMES[0]
_PRESET = re.compile(r"(\w+[-_])?z(ero)?[-_]?[0-3]([-_.]\w+)?", re.IGNORECASE)
_FOLDERS_ABOVE = 5
_FILES = (".json", ".yaml", ".yml", ".hjson")
_FOUND = ("/dev/null",)


@dataclass(frozen=True)
class FileFinder:
    """Finds files that a launch file names; ``beside`` is its folder, None for a line alone.

    ``found`` are those that were there.
    """

    beside: Path | None
    written: Mapping[str, WrittenFile]
    found: dict[str, None] = field(default_factory=dict)

    def places(self, name: str, folder: str) -> Iterator[Path]:
        """Where a file may be, the likeliest first."""
        path = Path(name)
        if path.is_absolute():
            yield path
            return
        starts = [Path(), *([] if self.beside is None else [self.beside])]
        if folder:
            starts = [*(start / folder for start in starts), *starts]
        for start in starts:
            yield start / path
        if self.beside is not None:
            yield from (
                above / path for above in list(self.beside.absolute().parents)[:_FOLDERS_ABOVE]
            )

    def find(self, name: str, folder: str) -> Path | None:
        """The file of that name."""
        for place in self.places(name, folder):
            try:
                if place.is_file():
                    self.found[str(place)] = None
                    return place
            except (OSError, ValueError):
                continue
        return None

    def find_written(self, name: str) -> WrittenFile | None:
        """What the launch file writes under that name."""
        wanted = PurePosixPath(name)
        for path, written in self.written.items():
            if PurePosixPath(path) == wanted:
                return written
        return None

    def describe(self, name: str, folder: str) -> str:
        """Words for where a file was looked for."""
        if Path(name).is_absolute():
            return f"there is no {name} on this machine"
        if self.beside is None:
            return f"there is no {name} here"
        return (
            f"there is no {name} here, beside the file or in the {_FOLDERS_ABOVE} folders above it"
        )


def text_of_file(job: LaunchJob, said: StatedFlag, finder: FileFinder) -> tuple[str, str]:
    """The name and the text of the file that ``said`` names.

    Raises:
        Asked: it is not where the line says, or only a shell could tell.
        ConfigError: it cannot be read as text.
    """
    word = said.values[0]
    for name in (word.text, said.name):
        named = job.settings.get(name)
        if named is not None:
            job.used.add(name)
            if not Path(named).is_file():
                raise ConfigError(f"--set {name}={named}: there is no such file", fix="correct it")
            return named, text_of(Path(named))
    folder = job.line.command.folder
    written = finder.find_written(word.text)
    if written is not None:
        return word.text, _text_written(word.text, written, said)
    name = word.text
    if word.holes:
        name = _end_of_path(word)
        if not name or finder.find(name, folder) is None:
            raise Asked(_fact_of_path(said, word))
    path = finder.find(name, folder)
    if path is None:
        raise Asked(
            Fact(
                said.name,
                f"{said.key} {name} (line {said.place.line})",
                f"{finder.describe(name, folder)}: put it there, or say where it is",
                said.place.line,
                "FILE",
            )
        )
    return str(path), text_of(path)


def _text_written(name: str, written: WrittenFile, said: StatedFlag) -> str:
    if written.text is None:
        raise Asked(
            Fact(
                said.name,
                f"{said.key} {name} (line {said.place.line})",
                f"{written.by} writes it in line {written.place.line}, which is read and not run: "
                "run that line, and say where the file is",
                said.place.line,
                "FILE",
            )
        )
    holes = [part for part in written.text if isinstance(part, Hole)]
    if holes:
        wanted = StatedFlag(f"{name} as written in line {written.place.line}", (), said.place)
        raise Asked(fact_of(holes[0], wanted))
    return "".join(part for part in written.text if isinstance(part, str))


def _end_of_path(word: Word) -> str:
    """``scripts/zero3.json`` of ``$ROOT/scripts/zero3.json``."""
    last = word.holes[-1].text
    end = word.text.rpartition(last)[2]
    return end.lstrip("/") if end.startswith("/") else ""


def _fact_of_path(said: StatedFlag, word: Word) -> Fact:
    return Fact(
        said.name,
        f"{said.key} {word.text} (line {said.place.line})",
        f"the configuration that the line names; only your shell knows {word.holes[0].text}",
        said.place.line,
        "FILE",
    )


# -- accelerate's YAML -----------------------------------------------------------------------------


def read_accelerate(
    job: LaunchJob, finder: FileFinder
) -> tuple[tuple[StatedFlag, ...], Node | None, str]:
    """The keys of ``accelerate launch --config_file`` as flags, its root, and its name.

    Raises:
        Asked, ConfigError: as ``text_of_file``; it is no YAML.
    """
    said = next(
        (link.find("config_file") for link in job.line.links if link.launcher == "accelerate"), None
    )
    if said is None or not said.values:
        return (), None, ""
    name, text = text_of_file(job, said, finder)
    if name.endswith(".json"):
        return (), None, name
    root = yaml_places.parse(text, name=name)
    found = []
    for path, entry in leaves(root):
        if path[0] == "deepspeed_config" or entry.node.plain() in ({}, None):
            continue
        value = entry.node.plain()
        text = str(value).lower() if isinstance(value, bool) else str(value)
        found.append(
            StatedFlag(
                ".".join(path), (Word(text, entry.place),), entry.place, file=Path(name).name
            )
        )
    return tuple(found), root, name


# -- DeepSpeed's -----------------------------------------------------------------------------------


def read_deepspeed(
    job: LaunchJob, finder: FileFinder, root: Node | None, yaml_name: str
) -> Document | None:
    """The configuration of DeepSpeed that the job is given; None where there is none.

    ``root`` is accelerate's YAML, where the line names one.

    Raises:
        Asked: a file is not where the line says.
        ConfigError: it is invalid, or two of them contradict one another.
    """
    found: list[tuple[StatedFlag, Document]] = []
    for said in job.arguments:
        if said.name in NAMES and holds_json(said):
            found.append((said, read_text(said.text, name=said.file or job.source)))
        elif said.name in NAMES and said.values and _names_a_file(said, finder):
            name, text = text_of_file(job, said, finder)
            found.append((said, read_text(text, name=name)))
        elif said.name == _DEEPSPEED and said.values and _is_preset(said):
            if said.name not in job.settings:
                raise Asked(_fact_of_preset(said))
            name, text = text_of_file(job, said, finder)
            found.append((said, read_text(text, name=name)))
    document = _of_accelerate(job, finder, root, yaml_name)
    if document is not None:
        found.append(document)
    if not found:
        return None
    (first, chosen), *others = found
    for said, other in others:
        if other.root.plain() != chosen.root.plain():
            raise ConfigError(
                f"{job.source}:{said.place.line}: {first.key} {chosen.name} and {said.key} "
                f"{other.name} are two configurations of DeepSpeed that contradict one another",
                fix="keep one of them",
                line=said.place.line,
            )
    return chosen


def _names_a_file(said: StatedFlag, finder: FileFinder) -> bool:
    word = said.values[0]
    if word.open:
        return True
    known = word.text.lower().endswith(_FILES) or "/" in word.text
    return known or finder.find_written(word.text) is not None


def _is_preset(said: StatedFlag) -> bool:
    """Whether a script has a configuration of its own by that name: ``zero3``."""
    return (
        re.fullmatch(r"(\w+[-_])?z(ero)?[-_]?[0-3]([-_.]\w+)?", said.values[0].text, re.I)
        is not None
    )


def _fact_of_preset(said: StatedFlag) -> Fact:
    name, line = said.values[0].text, said.place.line
    look = f"{name} is no file: what the script takes for it, as its package or its folder has it"
    return Fact(said.name, f"{said.key} {name} (line {line})", look, line, "FILE")


def _of_accelerate(
    job: LaunchJob, finder: FileFinder, root: Node | None, yaml_name: str
) -> tuple[StatedFlag, Document] | None:
    if accelerate_flags.find_engine(job) != accelerate_flags.DEEPSPEED:
        return None
    said = job.option("deepspeed_config_file")
    if said is not None and said.values:
        name, text = text_of_file(job, said, finder)
        return said, read_text(text, name=name)
    block = None if root is None else root.value.get("deepspeed_config")
    if block is not None and block.node.is_mapping:
        assert root is not None
        elsewhere = block.node.value.get("deepspeed_config_file")
        if elsewhere is not None:
            place = elsewhere.place
            named = Word(str(elsewhere.node.plain()), place)
            inner = StatedFlag("deepspeed_config_file", (named,), place, file=Path(yaml_name).name)
            name, text = text_of_file(job, inner, finder)
            return inner, read_text(text, name=name)
        return StatedFlag("deepspeed_config", (), block.place), document_of(yaml_name, root)
    return _of_flags(job)


def _of_flags(job: LaunchJob) -> tuple[StatedFlag, Document]:
    """``--use_deepspeed --zero_stage 3``: the flags are the configuration."""
    entries: dict[str, MappingEntry] = {}
    for name in ACCELERATE:
        said = job.option(name)
        if said is not None:
            value = _plain_value(job.text(said))
            entries[name] = MappingEntry(said.place, Node(value, said.place))
    if "zero_stage" not in entries:
        entries["zero_stage"] = MappingEntry(Place(), Node(2))
    top = {"deepspeed_config": MappingEntry(Place(), Node(entries))}
    precision = job.option("mixed_precision")
    if precision is not None:
        value = Node(job.text(precision), precision.place)
        top["mixed_precision"] = MappingEntry(precision.place, value)
    said = job.option("use_deepspeed", "zero_stage")
    assert said is not None
    return said, document_of(job.source, Node(top))


def _plain_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        return text


def list_keys(document: Document) -> dict[str, Any]:
    """Dotted keys of a configuration with their values."""
    return {".".join(path): entry.node.plain() for path, entry in leaves(document.root)}


# -- what fills "auto" -----------------------------------------------------------------------------


def settings_for(
    job: LaunchJob, configured: Mapping[str, Any]
) -> tuple[dict[str, str], list[Fact]]:
    """What fills each "auto" of the file, from the line and ``--set``; and what nobody has said.

    Raises:
        Asked: the line's value is known to a shell alone.
        ConfigError: it is no number.
    """
    settings = {name: text for name, text in job.settings.items() if name in auto.ARGUMENTS}
    job.used |= set(settings)
    open_keys = [key for key, value in configured.items() if value == auto.AUTO]
    wanted = {name for key in open_keys for name in auto.list_needs(key)}
    for name in auto.ARGUMENTS:
        said = job.argument(name)
        if said is not None and name in wanted and name not in settings and job.family:
            settings[name] = _setting(job, said)
    facts = []
    ratio = job.argument("warmup_ratio")
    needs_warmup = "scheduler.params.warmup_num_steps" in open_keys
    if needs_warmup and ratio is not None and "warmup_steps" not in settings:
        facts.append(
            Fact(
                "warmup_steps",
                f"scheduler.params.warmup_num_steps is {ratio.text} of the updates",
                "the Trainer's log: Total optimization steps, times that share, rounded up",
                ratio.place.line,
                "STEPS",
            )
        )
    if job.family != "hugging-face":
        needed = {name: key for key in open_keys for name in auto.list_needs(key)}
        facts += [
            Fact(
                name,
                f'{key}, which is "auto"',
                "where the script makes its TrainingArguments, or the YAML that it reads",
                job.line.line,
            )
            for name, key in needed.items()
            if name not in settings
        ]
    return settings, facts


def _setting(job: LaunchJob, said: StatedFlag) -> str:
    if said.name in ("fp16", "bf16"):
        job.text(said)
        return "true" if said.is_on else "false"
    value = job.number(said)
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(value)


# -- arguments in a file ---------------------------------------------------------------------------


def read_argument_file(
    job: LaunchJob, finder: FileFinder, marks: frozenset[str]
) -> tuple[StatedFlag, ...]:
    """Arguments of the Trainer that the script reads from a YAML or JSON file of its line.

    A file that is not there, or holds something else, is the script's own.
    """
    for said in job.arguments:
        word = said.values[0] if said.values else None
        if word is None or word.open or said.name in NAMES or len(said.values) != 1:
            continue
        if not word.text.lower().endswith((".yaml", ".yml", ".json")):
            continue
        path = finder.find(word.text, job.line.command.folder)
        if path is None:
            continue
        try:
            root = yaml_places.parse(text_of(path), name=str(path))
        except ConfigError:
            continue
        if len(marks & set(root.value)) >= 3:
            return tuple(read_flags(root, path.name))
    return ()


def holds_json(said: StatedFlag) -> bool:
    """The value is a configuration itself, not the name of its file."""
    return bool(said.values) and said.values[0].text.lstrip().startswith("{")


def read_flags(root: Node, file: str) -> Iterator[StatedFlag]:
    """The entries of a file as flags of its keys."""
    for key, entry in root.value.items():
        value = entry.node.plain()
        value = json.dumps(value) if isinstance(value, dict) else value
        items: Sequence[Any] = value if isinstance(value, list) else [value]
        texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
        words = tuple(Word(text, entry.place) for text in texts)
        yield StatedFlag(key, words, entry.place, file=file)
