"""A folder as a project: the jobs that its launch files start, its scripts and configurations.

Files are found by what they hold, not by their names. What a job names belongs to it; the rest
stands by itself. Nothing is executed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.errors import ConfigError, ResourceError, TorshError
from torsh_trainer.translate.base import TranslationRequest, Translator
from torsh_trainer.translate.engines import find_translators
from torsh_trainer.translate.plan import Plan

_CONFIGURATIONS = frozenset([".json", ".hjson", ".yaml", ".yml"])
_SCRIPTS = frozenset([".py", ".ipynb"])
_SHELLS = frozenset(
    ["", ".sh", ".bash", ".zsh", ".sbatch", ".slurm", ".job", ".pbs", ".lsf", ".sub", ".srun"]
)
_SKIPPED = frozenset(["__pycache__", "node_modules", "site-packages", "build", "dist"])
_LARGEST_BYTES = 1_000_000
_MOST_FILES = 20_000
_MOST_JOBS = 400

LAUNCH, SCRIPT, CONFIGURATION = "launch file", "script", "configuration"
"""What a file of a project is."""


@dataclass(frozen=True)
class ProjectJob:
    """One job, or a file that none names: its plan, or the ``error`` that reading it ended in.

    ``kind`` is one of ``LAUNCH``, ``SCRIPT``, ``CONFIGURATION``: what it was read from.
    """

    source: str
    kind: str
    plan: Plan | None = None
    error: TorshError | None = None


@dataclass(frozen=True)
class Project:
    """All jobs of a folder, launch files first, then scripts and configurations that none names.

    ``read`` is how many files were looked at; ``notes`` say what was not.
    """

    folder: str
    jobs: tuple[ProjectJob, ...]
    read: int
    notes: tuple[str, ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of what could be read."""
        return tuple(job.plan for job in self.jobs if job.plan is not None)

    @property
    def exit_code(self) -> int:
        """The largest of its plans; 2 where a file could not be read."""
        if any(job.error is not None for job in self.jobs):
            return 2
        return max((plan.exit_code for plan in self.plans), default=0)

    def shorten(self, source: str) -> str:
        """The name of a file as seen from the folder."""
        given = str(self.folder).rstrip("/") + "/"
        return source.removeprefix(given).removeprefix(str(Path(given).absolute()) + "/")

    def count(self, kind: str) -> int:
        """How many jobs were read from files of this kind."""
        return sum(job.kind == kind for job in self.jobs)


def read_project(folder: Path, asked: TranslationRequest) -> Project:
    """The jobs in ``folder`` and the folders below it.

    Raises:
        ConfigError: there is none, or ``asked`` is about one job.
        ResourceError: the folder cannot be listed.
    """
    for option, value in (("--set", asked.settings), ("--command", asked.command)):
        if value:
            raise ConfigError(
                f"{option} belongs to one job, and {folder} is a folder",
                fix="translate the folder without it, then the job by its own line",
            )
    files, notes = _list_files(folder)
    found = _sort_files(files)
    jobs: list[ProjectJob] = []
    named: set[Path] = set()
    for kind in (LAUNCH, SCRIPT, CONFIGURATION):
        for path, translator in found[kind]:
            if kind != LAUNCH and path.resolve() in named:
                continue
            if len(jobs) >= _MOST_JOBS:
                notes.append(f"only the first {_MOST_JOBS} jobs were read: name a folder below")
                return Project(str(folder), tuple(jobs), len(files), tuple(notes))
            made = list(_read_jobs(path, kind, translator, asked))
            jobs += made
            for job in made:
                if job.plan is not None:
                    named |= {Path(name).resolve() for name in job.plan.files}
    if not jobs:
        raise ConfigError(
            f"{folder} holds no job: of {len(files)} files none starts training or is a "
            "configuration of an engine that is known here",
            fix="name the folder of the project, or the file itself",
        )
    return Project(str(folder), tuple(jobs), len(files), tuple(notes))


def _read_jobs(
    path: Path, kind: str, translator: Translator, asked: TranslationRequest
) -> Iterator[ProjectJob]:
    try:
        for plan in translator.translate_jobs(path, asked):
            yield ProjectJob(plan.source, kind, plan)
    except (ConfigError, ResourceError) as error:
        yield ProjectJob(str(path), kind, error=error)


def _sort_files(files: Sequence[Path]) -> dict[str, list[tuple[Path, Translator]]]:
    """Those that are jobs or configurations, by what they are."""
    found: dict[str, list[tuple[Path, Translator]]] = {
        kind: [] for kind in (LAUNCH, SCRIPT, CONFIGURATION)
    }
    translators = find_translators()
    for path in files:
        for translator in translators:
            try:
                is_ours = translator.identifies(path)
            except (ConfigError, ResourceError):  # no text, or gone: nobody named it
                break
            if is_ours:
                found[_kind_of(path)].append((path, translator))
                break
    return found


def _kind_of(path: Path) -> str:
    if path.suffix.lower() in _SCRIPTS:
        return SCRIPT
    return CONFIGURATION if path.suffix.lower() in _CONFIGURATIONS else LAUNCH


def _list_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Files that may be of interest, in order, and words about those that were passed over."""
    found: list[Path] = []
    large: list[str] = []

    def fail(error: OSError) -> None:
        if Path(error.filename or "") == folder:
            raise ResourceError(f"cannot list {folder}: {error.strerror}", fix="check it")

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if _is_source(Path(root), name))
        for name in sorted(names):
            path = Path(root) / name
            if (
                path.suffix.lower() not in _SHELLS | _SCRIPTS | _CONFIGURATIONS
                or name.startswith(".")
                or (not path.suffix and name.isupper())  # README, LICENSE, PKG-INFO
                or not path.is_file()
            ):
                continue
            if path.stat().st_size > _LARGEST_BYTES:
                large.append(name)
                continue
            found.append(path)
            if len(found) == _MOST_FILES:
                return found, [
                    f"only the first {_MOST_FILES} files were looked at: name a folder below"
                ]
    notes = []
    if large:
        listed = ", ".join(large[:4]) + (" and others" if len(large) > 4 else "")
        notes.append(f"too large to be a job: {listed}")
    return found, notes


def _is_source(root: Path, name: str) -> bool:
    """A folder that may hold the user's own files."""
    if name.startswith(".") or name in _SKIPPED or name.endswith(".egg-info"):
        return False
    return not (root / name / "pyvenv.cfg").exists()
