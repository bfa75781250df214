"""From what a user names to one job: launch line, settings, environment, script, or several."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate import yaml_places
from torsh_trainer.translate.horovod import launch, script_leaves, yaml_files
from torsh_trainer.translate.horovod.job import ELASTIC, HorovodJob, Leaf, Options, Problem, refuse
from torsh_trainer.translate.horovod.launch import Launch
from torsh_trainer.translate.plan import Fact
from torsh_trainer.translate.python.arguments import read_setting, read_words
from torsh_trainer.translate.python.environment import read_environment
from torsh_trainer.translate.python.parsing import read_source
from torsh_trainer.translate.python.training import TrainingScript
from torsh_trainer.translate.reading import text_of

Sort = Literal["launch", "config", "wrapper", "environment", "script"]
"""What a file of Horovod's is."""

READS = (
    "for Horovod a line with horovodrun, its --config-file, HOROVOD_ variables as KEY=VALUE, the "
    "arguments of DistributedOptimizer as YAML, or a Python script that imports horovod.torch"
)
_ENVIRONMENT = re.compile(r"^\s*(export\s+)?HOROVOD_\w+=", re.MULTILINE)
_IMPORTS = re.compile(r"^\s*(?:from\s+horovod\b|import\s[^#\n]*\bhorovod\b)", re.MULTILINE)
_PYTHON = re.compile(r"^#!.*\bpython|^\s*(import|from)\s+horovod\b", re.MULTILINE)


def sort_of(path: Path, text: str) -> Sort | None:
    """What ``text`` is, by its content; None where it is nothing of Horovod's."""
    if path.suffix.lower() == ".json":
        return None
    if path.suffix in (".py", ".ipynb") or _PYTHON.search(text):
        return "script" if _IMPORTS.search(text) else None
    if path.suffix.lower() in (".yaml", ".yml"):
        return _sort_of_yaml(path, text)
    if launch.launches(text):
        return "launch"
    if _ENVIRONMENT.search(text):
        return "environment"
    return None


def _sort_of_yaml(path: Path, text: str) -> Sort | None:
    try:
        root = yaml_places.parse(text, name=str(path))
    except ConfigError:
        return None  # whoever reads it next says what is wrong
    if yaml_files.is_wrapper(root):
        return "wrapper"
    return "config" if yaml_files.is_config(root) else None


def is_horovod_script(text: str) -> bool:
    """Whether Python text trains under horovod.torch, as far as its words tell."""
    return _IMPORTS.search(text) is not None and "DistributedOptimizer" in text


def script_job(
    path: Path, options: Options, arguments: Mapping[str, Any]
) -> tuple[HorovodJob, frozenset[str]]:
    """The job of a script that another launcher starts with ``arguments``, and what it hangs on.

    Of ``options.settings`` some may be about that launcher.

    Raises:
        ConfigError: it is invalid, with the place and the next move.
        ResourceError: a file cannot be read.
    """
    reading = _Reading(options)
    reading.arguments = arguments
    reading.read("script", path, read_source(path))
    job = reading.job(str(path), is_whole=False)
    return job, frozenset(reading.used)


def job_of(source: str | Path, options: Options) -> HorovodJob:
    """The job that ``source``, and ``options.command`` beside it, describe.

    Raises:
        ConfigError: it is invalid, with the place and the next move.
        ResourceError: a file cannot be read.
    """
    reading = _Reading(options)
    if options.command is not None:
        reading.launch(options.command, name="--command", file="--command" if source else "")
    name = str(source) if source else "--command"
    if source:
        path = Path(source)
        text = read_source(path)
        sort = sort_of(path, text)
        if sort is None:
            raise ConfigError(f"{path} is no job on Horovod", fix=f"name {READS}")
        reading.read(sort, path, text)
    return reading.job(name)


class _Reading:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.settings = {name: read_setting(text) for name, text in options.settings.items()}
        self.leaves: list[Leaf] = []
        self.problems: list[Problem] = []
        self.used: set[str] = set()
        self.arguments: Mapping[str, Any] = {}
        self.pending: tuple[Path, str, str] | None = None
        self.started: Launch | None = None
        self.script = False
        self.facts: tuple[Fact, ...] = ()
        self.files: list[str] = []
        self.training: TrainingScript | None = None

    def read(self, sort: Sort, path: Path, text: str, file: str = "") -> None:
        if sort == "launch":
            self.launch(text, name=str(path), file=file, beside=path.parent)
        elif sort == "script":
            self.pending = (path, text, file)
        elif sort == "environment":
            self.take(launch.environment(text, name=str(path), file=file))
        else:
            root = yaml_places.parse(text, name=file or str(path))
            reader = yaml_files.config if sort == "config" else yaml_files.wrapper
            self.take(reader(root, file=file))

    def take(self, found: tuple[Sequence[Leaf], Sequence[Problem]]) -> None:
        leaves, problems = found
        self.leaves += leaves
        self.problems += problems

    def launch(self, text: str, *, name: str, file: str, beside: Path | None = None) -> None:
        if self.started is not None:
            raise ConfigError(
                f"{name} starts a job, and so does --command", fix="leave --command out"
            )
        known = dict(self.options.settings)
        self.used |= {key for key in known if re.search(rf"\$\{{?{re.escape(key)}\b", text)}
        self.started = launch.read(text, name=name, known=known, file=file)
        self.take((self.started.leaves, self.started.problems))
        words = read_words([word.text for word in self.started.arguments])
        words.environment = read_environment(self.started.environment)
        self.arguments = words
        if self.started.config_file is not None:
            path = self.find_needed("--config-file", self.started.config_file, beside)
            self.read("config", path, text_of(path), file=self.started.config_file)
        if self.started.hostfile is not None:
            path = self.find_needed("--hostfile", self.started.hostfile, beside)
            self.take(launch.hostfile(text_of(path), file=self.started.hostfile))
        if self.started.script is not None:
            named = self.started.script.text
            script = _beside(named, beside)
            if script is not None:
                self.read("script", script, text_of(script), file=named)

    def find_needed(self, option: str, named: str, folder: Path | None) -> Path:
        """A file that an option of the launch line names.

        Raises:
            ConfigError: it is not there.
        """
        path = _beside(named, folder)
        if path is None:
            raise ConfigError(
                f"{option} {named}: there is no such file",
                fix="translate where it is, or take the option out",
            )
        return path

    def job(self, name: str, *, is_whole: bool = True) -> HorovodJob:
        size = self.world_size(name)
        if self.pending is not None:
            size = self.read_script(*self.pending, size)
        self.check_problems(name)
        leaves = _with_precedence(self.leaves)
        keys = [leaf.key for leaf in leaves]
        if is_whole:
            script_leaves.check_used(self.settings, frozenset(self.used), keys)
        return HorovodJob(
            name,
            self.options,
            tuple(leaves),
            self.warnings,
            size,
            self.script,
            self.facts,
            tuple(self.files),
            self.training,
        )

    def world_size(self, name: str) -> int | None:
        stated = self.options.world_size
        leaf = next((leaf for leaf in self.leaves if leaf.name == "num_proc"), None)
        if leaf is not None and stated not in (None, leaf.value):
            raise ConfigError(
                f"--world-size {stated} is not {leaf.key} {leaf.value}", fix="leave one of them out"
            )
        return stated if leaf is None else int(leaf.value)

    def read_script(self, path: Path, text: str, file: str, size: int | None) -> int | None:
        """Reads it; the processes of the job, which it may start itself."""

        def read_for(size: int | None) -> script_leaves.Read:
            return script_leaves.read(
                text,
                name=file or str(path),
                file=file,
                size=size,
                arguments=self.arguments,
                settings=self.settings,
                path=path,
            )

        read = read_for(size)
        if size is None and (size := _count_started(read.leaves)) is not None:
            read = read_for(size)
        self.take((read.leaves, read.problems))
        self.facts, self.files = read.facts, [*([str(path)] if file else []), *read.files]
        self.used |= read.used
        self.training = read.script
        self.script = True
        return size

    def check_problems(self, name: str) -> None:
        found = [*self.problems, *_contradictions(self.leaves)]
        if self.options.lenient:
            found = [problem for problem in found if not problem.overlooked]
        refuse(name, found)

    @property
    def warnings(self) -> tuple[str, ...]:
        said = [p for p in self.problems if p.overlooked]
        older = [leaf for leaf in self.leaves if leaf.rule == "older"]
        return tuple(
            [f"{p.file + ':' if p.file else ''}{p.place}: {p.what}; {p.fix}" for p in said]
            + [f"{leaf.place}: Horovod passes over {leaf.key}, an older name" for leaf in older]
        )


def _beside(named: str, folder: Path | None) -> Path | None:
    """The file of that name, from here or beside the line that names it."""
    places = [Path(named), *([folder / named] if folder is not None else [])]
    return next((place for place in places if place.is_file()), None)


def _count_started(leaves: Sequence[Leaf]) -> int | None:
    """How many processes a script starts itself, where it does so with one number."""
    counts = {leaf.value for leaf in leaves if leaf.rule == "script.run"}
    count = counts.pop() if len(counts) == 1 else None
    return count if isinstance(count, int) and count > 0 else None


def _contradictions(leaves: Sequence[Leaf]) -> Iterator[Problem]:
    """What Horovod itself refuses, when it starts processes or wraps the optimizer."""
    said = {leaf.name: leaf for leaf in leaves}
    factor, op = said.get("gradient_predivide_factor"), said.get("op")
    divides = factor is not None and factor.value not in (1.0, None)
    if factor is not None and divides and op is not None and op.value != "average":
        what = f"{factor.key} goes with op average alone, not with {op.value}"
        yield Problem(factor.file, factor.place, what, "remove one of them")
    count, hosts = said.get("num_proc"), said.get("hosts")
    if count is None or hosts is None or not hosts.value or said.keys() & ELASTIC:
        return
    slots = sum(host.slots for host in hosts.value)
    if count.value > slots:
        what = f"{count.key} {count.value} is more than the {slots} slots of "
        what += hosts.file or hosts.key
        yield Problem(count.file, count.place, what, "ask for fewer, or name more hosts")


def _with_precedence(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Of what is set several times the option counts, then the file, then the environment."""
    ranked: dict[str, Leaf] = {}
    for leaf in sorted(leaves, key=_rank, reverse=True):
        ranked[leaf.name] = leaf
    return [
        leaf
        if ranked[leaf.name] is leaf or _may_repeat(leaf)
        else replace(leaf, over=ranked[leaf.name].key)
        for leaf in leaves
    ]


def _rank(leaf: Leaf) -> int:
    if leaf.key.startswith("-"):
        return 0
    return 2 if leaf.key.startswith("HOROVOD_") else 1


def _may_repeat(leaf: Leaf) -> bool:
    several = ("optimizer.several", "schedule.several", "script.run")
    return leaf.key.startswith("hvd.") or leaf.rule in several
