"""What is read of a job before any flag of it is judged: its files, its script, its processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from torsh_trainer.errors import ConfigError, ResourceError, nearest
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.deepspeed.auto import AUTO as FILLED
from torsh_trainer.translate.launch import trainer_arguments
from torsh_trainer.translate.launch.configuration import (
    FileFinder,
    list_keys,
    read_accelerate,
    read_argument_file,
    read_deepspeed,
)
from torsh_trainer.translate.launch.fsdp_file import read_fsdp_file
from torsh_trainer.translate.launch.job import Asked, LaunchJob, LaunchLine, WorldShape
from torsh_trainer.translate.launch.lines import PYTHON, launcher_named, read_arguments
from torsh_trainer.translate.launch.script_arguments import (
    find_family,
)
from torsh_trainer.translate.launch.script_defaults import read_script_defaults
from torsh_trainer.translate.launch.scripts import (
    ScriptKind,
    find_kind,
    has_trainer,
)
from torsh_trainer.translate.plan import Fact
from torsh_trainer.translate.reading import Document, text_of


class PreparedJob(NamedTuple):
    """``script`` is one that decides, since it makes an engine of its own; ``script_text`` that of
    any script of the line that is here."""

    job: LaunchJob
    document: Document | None
    script: tuple[Path, ScriptKind] | None
    script_text: str
    script_notes: tuple[str, ...]
    reads_defaults: bool


def prepare_job(
    line: LaunchLine, *, source: str, finder: FileFinder, asked: TranslationRequest
) -> PreparedJob:
    """Reads what the line names; what is not there is asked for in ``job.facts``.

    Raises:
        ConfigError: a flag or a configuration is invalid, with its place and the next move.
        ResourceError: a file cannot be read.
    """
    job = LaunchJob(line, source, settings=asked.settings or {})
    _check_flags(job)
    job.arguments = tuple(read_arguments(line.arguments))
    root, yaml_name = None, ""
    try:
        job.yaml, root, yaml_name = read_accelerate(job, finder)
    except Asked as question:
        job.ask(question.fact)
        job.lacks_file = True
    from_file = read_argument_file(job, finder, trainer_arguments.MARKS)
    job.arguments = (*from_file, *job.arguments)
    job.family = find_family({said.name for said in job.arguments})
    job.world = _shape_of(job, asked)
    document = None
    try:
        document = read_deepspeed(job, finder, root, yaml_name)
    except Asked as question:
        job.ask(question.fact)
        job.lacks_file = True
    if document is not None:
        job.configured = list_keys(document)
    if not job.family and _hands_file_to_trainer(job):
        job.family = "hugging-face"
    try:
        job.fsdp = read_fsdp_file(job, finder)
    except Asked as question:
        job.ask(question.fact)
    _ask_for_words(job)
    script = _choose_script(job, finder)
    path = _locate_script(job, finder)
    defaults = read_script_defaults(job, path)
    job.arguments = (*defaults.said, *job.arguments)
    notes, text = defaults.notes, _text_of_script(path)
    return PreparedJob(job, document, script, text, notes, defaults.was_read)


def _ask_for_words(job: LaunchJob) -> None:
    """A file that starts what it is given (``torchrun $@``) says nothing about it by itself."""
    word = job.line.script
    hole = None if word is None else next((h for h in word.holes if h.name == "@"), None)
    if word is None or hole is None or word.text != hole.text:
        return
    look = "the script and its arguments, as you give them to this file"
    place = f"{hole.text} (line {word.place.line})"
    job.ask(Fact("@", place, look, word.place.line, "'train.py ARGS'"))


def _locate_script(job: LaunchJob, finder: FileFinder) -> Path | None:
    """The script of the line, where it is here."""
    word = job.line.script
    if word is None or word.holes or job.line.module or not word.text.endswith(".py"):
        return None
    return finder.find(word.text, job.line.command.folder)


def _text_of_script(path: Path | None) -> str:
    try:
        return "" if path is None else text_of(path)
    except (ConfigError, ResourceError):
        return ""


def _choose_script(job: LaunchJob, finder: FileFinder) -> tuple[Path, ScriptKind] | None:
    """The script that decides, since it makes an engine of its own; the names of its arguments
    decide nothing then. A script of the Trainer's, or of Megatron's, is known by those."""
    path = None if job.family == "megatron" else _locate_script(job, finder)
    if path is None:
        return None
    text = text_of(path)
    kind = find_kind(text)
    if kind is None or (job.family and has_trainer(text, name=str(path))):
        return None
    job.family = ""
    return path, kind


def _hands_file_to_trainer(job: LaunchJob) -> bool:
    """Whether ``--deepspeed FILE`` is the Trainer's: "auto" in that file is a word of its alone."""
    said = job.argument("deepspeed")
    names = {said.name for said in job.arguments}
    return (
        said is not None
        and bool(said.values)
        and FILLED in job.configured.values()
        and bool(names & trainer_arguments.MARKS)
        and not names & trainer_arguments.OTHERS_MARKS
    )


def _check_flags(job: LaunchJob) -> None:
    problems = [problem for link in job.line.links for problem in link.problems]
    if not problems:
        return
    first, *others = problems
    fix = first.fix + "".join(
        f"\n  also {p.place}: {p.what}" + (f"; {p.fix}" if p.fix else "") for p in others[:20]
    )
    raise ConfigError(
        f"{job.source}:{first.place}: {first.what}",
        fix=fix,
        line=first.place.line,
        column=first.place.column,
    )


def _shape_of(job: LaunchJob, asked: TranslationRequest) -> WorldShape:
    """How many processes the launchers of the line start between them."""
    shape = WorldShape()
    outer: WorldShape | None = None
    for link in job.line.links:
        launcher = launcher_named(link.launcher)
        if launcher is None:
            continue
        try:
            found = launcher.shape(job, link)
        except Asked as question:
            job.ask(question.fact)
            found = WorldShape(None, None if link is not job.line.launcher else 1)
        if launcher.keeps:
            outer = found
        shape = found
    if outer is not None and job.line.launcher.launcher not in ("srun", "mpirun", PYTHON):
        nodes = shape.nodes if shape.nodes != 1 else outer.total or outer.nodes
        shape = WorldShape(shape.per_node, nodes, shape.total)
    elif outer is not None:
        shape = outer
    if asked.world_size is not None:
        return WorldShape(shape.per_node, shape.nodes, asked.world_size)
    return shape


def check_settings(settings: Mapping[str, str], text: str, known: set[str]) -> None:
    """Makes sure that every ``--set`` names something of the file or of its jobs.

    Raises:
        ConfigError: one does not.
    """
    variables = set(re.findall(r"\$\{?[#!]?(\w+)", text)) | set(re.findall(r"(\w+)\+?=", text))
    variables |= {name.replace("-", "_") for name in re.findall(r"<([A-Za-z_][\w-]*)>", text)}
    variables |= {"@"} if re.search(r"\$\{?[@*]", text) else set()
    for name in settings:
        if name not in variables and name not in known:
            offer = nearest(name, {*variables, *known} if _is_near(name, known) else variables)
            raise ConfigError(f"--set {name}: nothing of this job hangs on it", fix=offer)


def _is_near(name: str, known: set[str]) -> bool:
    return bool(get_close_matches(name, known, n=1))
