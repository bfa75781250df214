"""A launch file or a launch line to native: every job in it, and what it writes for itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest, Translator
from torsh_trainer.translate.deepspeed import auto, keys
from torsh_trainer.translate.deepspeed.script.configuration import WORLD_SIZE
from torsh_trainer.translate.horovod.translator import HorovodTranslator
from torsh_trainer.translate.launch.commands import RUN
from torsh_trainer.translate.launch.configuration import NAMES, FileFinder
from torsh_trainer.translate.launch.job import LaunchLine
from torsh_trainer.translate.launch.lines import HOROVODRUN, PYTHON, read_line
from torsh_trainer.translate.launch.planning import plan_job
from torsh_trainer.translate.launch.preparing import check_settings
from torsh_trainer.translate.launch.sweeps import Rounds, join_rounds
from torsh_trainer.translate.outcomes import dead, exact
from torsh_trainer.translate.plan import Fact, Finding, Plan
from torsh_trainer.translate.python.arguments import is_expression
from torsh_trainer.translate.reading import exists, text_of
from torsh_trainer.translate.shell.script import ShellScript, read_script
from torsh_trainer.translate.shell.words import Command, plain

_SHEBANG = re.compile(r"\s*#!.*\b(ba|z|k|da)?sh\b")
_SCHEDULED = re.compile(r"^#(SBATCH|PBS|BSUB)\b", re.MULTILINE)
_ENDINGS = (".sh", ".bash", ".zsh", ".sbatch", ".slurm", ".job", ".pbs", ".lsf", ".sub", ".srun")
_STARTS = re.compile(
    r"^[ \t]*(?:\w+=\S*[ \t]+|[\w./-]+[ \t]+(?:-\S+[ \t]+)*)*?"
    r"(?:deepspeed|accelerate[ \t]+launch|torchrun|mpirun|mpiexec|srun|"
    r"\S*python[\d.]*[ \t]+(?:-u[ \t]+)?-m[ \t]+torch\.distributed\.\w+)(?:[ \t\\]|$)",
    re.MULTILINE,
)
_HOROVOD = re.compile(r"(?:^|[\s;&|/(])horovodrun(?:\s|$)", re.MULTILINE)
_PYTHON_LINES = re.compile(r"^(import|from)\s+[\w.]+|^(def|class)\s+\w+.*:\s*$", re.MULTILINE)
_DIRECTIVE = re.compile(
    r"^#SBATCH[ \t]+(--?[\w-]+)(?:[= \t][ \t]*([^#\n]*?))?[ \t]*(?:#.*)?$", re.MULTILINE
)
_FIRST_COMMAND = re.compile(r"^[ \t]*[^#\s]", re.MULTILINE)
"""Where sbatch stops to look for directives."""

_LONG = {"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-G": "--gpus"}
_SCHEDULER_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gpus-per-task": ("SLURM_GPUS_PER_TASK",),
    "--gpus": ("SLURM_GPUS",),
    "--gres": ("SLURM_GPUS_ON_NODE",),
    "--job-name": ("SLURM_JOB_NAME",),
}
"""Directives of Slurm -> the variables that it sets by them."""

_QUIET = frozenset(
    [
        "echo",
        "printf",
        "cd",
        "mkdir",
        "export",
        "set",
        "true",
        ":",
        "test",
        "[",
        "[[",
        "sleep",
        "date",
        "exit",
        "tee",
        "cat",
        "wait",
        "read",
        "trap",
    ]
)
"""Commands that no reader misses."""

_MOST_JOBS = 40
_LARGEST_SOURCED = 200_000
_ENVIRONMENT = re.compile(
    r"(^|/)(activate|\.?(bash|zsh)?rc|\.?(bash_)?profile|conda\.sh|init\.sh)$"
)
"""Files that ``source`` names for the programs that they bring, of one machine alone."""


class LaunchTranslator(Translator):
    """A shell or Slurm file, or a line, that starts training by any launcher but Horovod's."""

    name = "launch"
    title = "launch file"
    reads = (
        "a shell or Slurm file, or --command, that starts training by deepspeed, accelerate, "
        "torchrun, srun, mpirun or python"
    )
    priority = 30

    def recognises(self, source: Path, command: str | None) -> bool:
        if command is not None:
            return _is_launch(command)
        if not exists(source) or source.is_dir():
            return False
        try:
            text = text_of(source)
        except ConfigError:
            return False
        return _is_shell_file(source, text)

    def identifies(self, source: Path) -> bool:
        return self.recognises(source, None) and _is_launch_text(text_of(source))

    def translate(self, source: str | Path, asked: TranslationRequest) -> Plan:
        plans = self.translate_jobs(source, asked)
        if len(plans) > 1:
            raise ConfigError(
                f"{source or '--command'} starts {len(plans)} jobs: "
                + ", ".join(plan.source for plan in plans[:8]),
                fix="give the line of one of them with --command",
            )
        return plans[0]

    def translate_jobs(self, source: str | Path, asked: TranslationRequest) -> tuple[Plan, ...]:
        name = str(source) if source else "--command"
        if asked.command is not None:
            text = asked.command
            name = "--command"
            beside = Path(source).parent if source else None
        else:
            text = text_of(Path(source))
            beside = Path(source).parent
        return LaunchFile(name, text, beside, asked).plans()


def _is_launch(text: str) -> bool:
    """It starts something by another launcher than Horovod's, or does so several times."""
    if _STARTS.search(text) is not None:
        return True
    return len(_HOROVOD.findall(text)) != 1


def _is_launch_text(text: str) -> bool:
    return _STARTS.search(text) is not None or _HOROVOD.search(text) is not None


def _is_shell_file(path: Path, text: str) -> bool:
    """By its content: an ending decides only where the content says nothing."""
    if text.lstrip()[:1] in ("{", "[") or "\0" in text:
        return False
    if re.match(r"\s*#!.*python", text):
        return False
    shell = _SHEBANG.match(text) is not None or _SCHEDULED.search(text) is not None
    if not shell and _PYTHON_LINES.search(text) and path.suffix.lower() not in _ENDINGS:
        return False
    horovod = len(_HOROVOD.findall(text))
    starts = _STARTS.search(text) is not None
    if horovod == 1 and not starts and _SCHEDULED.search(text) is None:
        return False
    if (
        not starts
        and not horovod
        and re.search(r"^\s*(export\s+)?HOROVOD_\w+=", text, re.MULTILINE)
    ):
        return False
    if path.suffix.lower() in (".yaml", ".yml", ".md", ".rst", ".json", ".py", ".ipynb", ".toml"):
        return shell
    return shell or starts or path.suffix.lower() in _ENDINGS


class LaunchFile:
    """One source: its commands, the jobs among them, and the files that it writes."""

    def __init__(
        self,
        name: str,
        text: str,
        beside: Path | None,
        asked: TranslationRequest,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name, self.text, self.asked, self.beside = name, text, asked, beside
        self.directives = list(_read_directives(text))
        known = {**_variables_of(self.directives), **(asked.settings or {})}
        self.finder = FileFinder(beside, {})
        self.used: set[str] = set()
        self.script: ShellScript = read_script(
            text, name=name, known=known, open_text=self.open_sourced, environment=environment
        )
        self.finder = replace(self.finder, written=self.script.files)

    def open_sourced(self, name: str, folder: str) -> str | None:
        """The text of a file that ``source`` names; None for what makes an environment."""
        if _ENVIRONMENT.search(name):
            return None
        path = self.finder.find(name, folder)
        if path is None or path.stat().st_size > _LARGEST_SOURCED:
            return None
        return text_of(path)

    def lines(self) -> tuple[list[LaunchLine], list[LaunchLine]]:
        """The lines that start jobs, and those that only run Python beside them."""
        lines = [line for line in map(read_line, self.script.commands) if line is not None]
        started = [
            line for line in lines if line.launcher.launcher != PYTHON or len(line.links) > 1
        ]
        return (
            (started, [line for line in lines if line not in started]) if started else (lines, [])
        )

    def plans(self) -> tuple[Plan, ...]:
        jobs, others = self.lines()
        if not jobs:
            written = self.plans_written()
            if written:
                return written
            raise self.nothing_found()
        plans: list[Plan] = []
        groups = _group(jobs)
        for group in groups:
            made = [self.plan(line, len(groups) > 1) for line in group[:_MOST_JOBS]]
            rounds: list[Rounds] = [line.command.rounds for line in group[:_MOST_JOBS]]
            plans += made if len(made) == 1 else join_rounds(rounds, made)
        self.check_settings(jobs)
        plans = _tell_files_apart(plans)
        left = self.list_left(others)
        return tuple(self.finish(plan, left, len(plans)) for plan in plans)

    def plans_written(self) -> tuple[Plan, ...]:
        """The jobs of a launch file that this file writes, as those do that submit a job."""
        for path, written in self.script.files.items():
            if written.text is None or not _is_launch_text(text := plain(written.text)):
                continue
            inner = LaunchFile(self.name, text, self.beside, self.asked)
            inner.directives = inner.directives or self.directives
            where = f"{path}, which line {written.place.line} writes"
            note = f"the job stands in {where}; lines are its own"
            return tuple(replace(plan, notes=(*plan.notes, note)) for plan in inner.plans())
        return ()

    def plan(self, line: LaunchLine, several: bool) -> Plan:
        source = f"{self.name}:{line.line}" if several else self.name
        self.finder.found.clear()
        if line.launcher.launcher == HOROVODRUN:
            plan = self.plan_horovod(line, source)
        else:
            plan = plan_job(
                line,
                source=source,
                finder=self.finder,
                asked=self.asked,
                used=self.used,
                text=self.text,
            )
        if line.script is not None and not line.script.holes:
            self.finder.find(line.script.text, line.command.folder)
        return replace(plan, files=tuple(self.finder.found))

    def plan_horovod(self, line: LaunchLine, source: str) -> Plan:
        """One of several lines of horovodrun, through Horovod's own translator."""
        everything = (*line.command.around, *line.command.words)
        start = next(i for i, word in enumerate(everything) if word is line.launcher.word)
        around = {**line.command.exported, **line.command.variables}
        set_before = [f"{name}={_quote_plain(w.text, w.open)}" for name, w in around.items()]
        words = [_quote_plain(word.text, word.open) for word in everything[start:]]
        text = " ".join([*set_before, *words])
        script = next((w.text for w in everything[start:] if w.text.endswith(".py")), "")
        path = self.finder.find(script, line.command.folder) if script else None
        asked = replace(self.asked, command=text)
        plan = HorovodTranslator().translate(str(path) if path else "", asked)
        here = "launcher.num_processes" in plan.values
        return replace(
            plan,
            source=source,
            findings=tuple(_move_findings(plan.findings, line, script if path else "")),
            taken_for=f"horovodrun starts {script or text[:60]}",
            command=f"python {RUN}" if here else "",
        )

    def finish(self, plan: Plan, left: str, count: int) -> Plan:
        """What holds for the whole file, in each of its plans."""
        kind = "a launch line" if self.name == "--command" else "a shell file"
        if self.directives:
            kind = "a Slurm file"
        jobs = "" if count == 1 else f" with {count} jobs"
        taken = f"{kind}{jobs}, read and not executed"
        said = f"{taken}: {plan.taken_for}" if plan.taken_for else taken
        findings = (*plan.findings, *(_directive_findings(self.directives) if count == 1 else ()))
        notes = (*plan.notes, *([left] if left else []))
        notes = (*notes, *_notes_of_sourced(self.script.sourced))
        if self.script.assumed:
            names = ", ".join(self.script.assumed)
            notes = (
                *notes,
                f"taken for unset, since nothing sets them here: {names} (--set says otherwise)",
            )
        return replace(
            plan,
            taken_for=said,
            notes=notes,
            findings=tuple(
                sorted(
                    findings, key=lambda f: (not f.given, bool(f.file), f.file, f.line, f.column)
                )
            ),
        )

    def list_left(self, lines: Sequence[LaunchLine]) -> str:
        """Commands that are no launch, by their names."""
        places: dict[str, list[int]] = {}
        for line in lines:
            script = line.script.text if line.script is not None else line.launcher.launcher
            places.setdefault(f"python {script}", []).append(line.line)
        for command in self.script.commands:
            if not command.words or read_line(command) is not None:
                continue
            head = PurePosixPath(command.words[0].text).name or "source"
            if head in _QUIET or command.words[0].open:
                continue
            places.setdefault(head, []).append(command.words[0].place.line)
        if not places:
            return ""
        said = [f"{name[:60]} ({_list_lines(at)})" for name, at in list(places.items())[:12]]
        more = f" and {len(places) - 12} more" if len(places) > 12 else ""
        return f"left alone, by line: {', '.join(said)}{more}"

    def nothing_found(self) -> ConfigError:
        """The error for a file without a launch."""
        names = Counter(
            PurePosixPath(command.words[0].text).name
            for command in self.script.commands
            if command.words and not command.words[0].open
        )
        for command in self.script.commands:
            other = _other_file(command)
            if other:
                settings = "".join(
                    f" --set {i}={_quote_plain(word.text, '')}"
                    for i, word in enumerate(other[1:], 1)
                )
                return ConfigError(
                    f"{self.name} starts no training itself: line {other[0].place.line} runs "
                    f"{other[0].text}",
                    fix=f"translate {other[0].text}{settings}",
                )
        listed = ", ".join(name for name, _ in names.most_common(6)) or "nothing"
        return ConfigError(
            f"{self.name} is a shell file that starts no training: it runs {listed}",
            fix="name the file with the line of deepspeed, accelerate launch, torchrun, srun, "
            "mpirun, horovodrun or python, or give that line with --command",
        )

    def check_settings(self, jobs: Sequence[LaunchLine]) -> None:
        known = {
            *self.used,
            *auto.ARGUMENTS,
            *NAMES,
            WORLD_SIZE,
            *(key.dotted for key in keys.schema().values()),
        }
        blocks = {name.partition(".")[0] for name in known}
        asked = {
            name
            for name in self.asked.settings or {}
            if is_expression(name) and name.partition(".")[0] not in blocks
        }
        for line in jobs:
            if line.launcher.launcher == HOROVODRUN:
                known |= asked  # Horovod's own translator has looked at them
            known |= {
                word.text.lstrip("-").replace("-", "_").partition("=")[0] for word in line.arguments
            }
            known |= {word.text for word in line.arguments}
            known |= {said.name for link in line.links for said in link.said}
            known |= {
                hole.name
                for word in (*line.command.around, *line.command.words)
                for hole in word.holes
            }
        check_settings(self.asked.settings or {}, self.text, known)


def _notes_of_sourced(sourced: Mapping[str, bool]) -> Iterator[str]:
    """Words about files that the shell file takes in by ``source``."""
    read = [name for name, is_read in sourced.items() if is_read]
    unread = [
        name for name, is_read in sourced.items() if not is_read and not _ENVIRONMENT.search(name)
    ]
    if read:
        yield f"taken in, as source does: {', '.join(read)}"
    if unread:
        yield f"not read, since it is not here: {', '.join(unread)}; what it sets counts as unset"


def _move_findings(findings: Sequence[Finding], line: LaunchLine, script: str) -> Iterator[Finding]:
    """Findings of a line of its own, with the lines of the file that it stands in."""
    for finding in findings:
        here = finding.given and finding.file in ("", "--command")
        if here and (finding.file == "--command" or not script):
            yield replace(finding, file="", line=line.line)
        else:
            yield replace(finding, file=finding.file or script)


def _group(lines: Sequence[LaunchLine]) -> list[list[LaunchLine]]:
    """Lines that a loop repeats, together."""
    groups: dict[Any, list[LaunchLine]] = {}
    for number, line in enumerate(lines):
        place = line.links[0].word.place
        key = (place, line.command.conditions) if line.command.rounds else (place, number)
        groups.setdefault(key, []).append(line)
    return list(groups.values())


class _Directive(NamedTuple):
    """``#SBATCH --nodes=2``. ``is_read``: it stands before the first command, as sbatch has it."""

    name: str
    value: str
    line: int
    is_read: bool


def _read_directives(text: str) -> Iterator[_Directive]:
    first = _FIRST_COMMAND.search(text)
    for match in _DIRECTIVE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        is_read = first is None or match.start() < first.start()
        yield _Directive(match[1], (match[2] or "").strip().strip("\"'"), line, is_read)


def _variables_of(directives: Sequence[_Directive]) -> dict[str, str]:
    """What Slurm sets by its directives."""
    found: dict[str, str] = {}
    for name, value, _, is_read in directives:
        if not is_read:
            continue
        long = _LONG.get(name, name)
        for variable in _SCHEDULER_VARIABLES.get(long, ()):
            last = value.rpartition(":")[2] if long.startswith("--g") else value
            if long == "--job-name" or last.isdigit():
                found[variable] = last
    return found


def _directive_findings(directives: Sequence[_Directive]) -> Iterator[Finding]:
    for name, value, line, is_read in directives:
        outcome = exact("the scheduler reads it: keep the line")
        if not is_read:
            outcome = dead("it stands behind a command, where sbatch reads none: move it up")
        yield Finding(
            f"#SBATCH {name}",
            value,
            line,
            1,
            outcome.verdict,
            "",
            outcome.why,
            "slurm.directive",
        )


def _other_file(command: Command) -> list[Any]:
    """The words of another shell file that a command runs."""
    words = list(command.words)
    while words and PurePosixPath(words[0].text).name in (
        "bash",
        "sh",
        "sbatch",
        "source",
        ".",
        "srun",
        "nohup",
    ):
        words = words[1:]
        while words and words[0].text.startswith("-"):
            words = words[1:]
    return words if words and words[0].text.endswith(_ENDINGS) else []


def _list_lines(lines: Sequence[int]) -> str:
    """The first three of them."""
    different = sorted(set(lines))
    return ", ".join([*map(str, different[:3]), *(["..."] if len(different) > 3 else [])])


def _quote_plain(text: str, hole: str) -> str:
    if hole or re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    return "'" + text.replace("'", "'\\''") + "'"


def _tell_files_apart(plans: Sequence[Plan]) -> list[Plan]:
    """Jobs that ask for different files by one name ask for them by their paths."""
    asked = [fact for plan in plans for fact in plan.facts if fact.value == "FILE"]
    shared = {
        one.name
        for one in asked
        for other in asked
        if one.name == other.name and _path_of(one) != _path_of(other)
    }
    return [
        replace(
            plan,
            facts=tuple(
                replace(fact, name=_path_of(fact) or fact.name) if fact.name in shared else fact
                for fact in plan.facts
            ),
        )
        for plan in plans
    ]


def _path_of(fact: Fact) -> str:
    """The path in ``--deepspeed scripts/zero3.json (line 4)``."""
    found = re.match(r"\S+ (\S+) \(line \d+\)", fact.used)
    return found[1] if found else ""
