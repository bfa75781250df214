"""``python -m torsh_trainer translate FILE``: a foreign configuration becomes a recipe."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate import report
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.deepspeed import versions
from torsh_trainer.translate.deepspeed.source import CONTEXTS, MODES
from torsh_trainer.translate.engines import work_of
from torsh_trainer.translate.horovod import versions as horovod_versions
from torsh_trainer.translate.jobs import choose_job
from torsh_trainer.translate.own_task.command import (
    TaskFile,
    check_task,
    list_missing,
    make_task,
)
from torsh_trainer.translate.plan import EXIT_ASKS, RECIPE, Plan
from torsh_trainer.translate.project import read_project
from torsh_trainer.translate.reading import is_folder
from torsh_trainer.translate.recipe import recipe_of
from torsh_trainer.translate.table import table_of, table_of_project
from torsh_trainer.utils.files import write_text
from torsh_trainer.utils.foreign import readable

_WIDE = 200
"""Columns where no terminal says how many."""


ELSEWHERE = "choose another place"


def main(argv: Sequence[str]) -> int:
    """Translates the file that ``argv`` names; prints the report, returns 0, 10 or 11.

    Raises:
        ConfigError: the file is nothing that is known here, or an option means nothing.
        ResourceError: a file cannot be read or written.
    """
    options = _parser().parse_args(argv)
    check_report(options.report)
    if options.file is None and options.command is None:
        raise ConfigError(
            "translate wants a file", fix="name it, or give --command 'horovodrun ...'"
        )
    request = request_of(options)
    if options.file is not None and is_folder(Path(options.file)):
        if options.job is None:
            return _translate_project(Path(options.file), request, options)
        options.file, options.job = _find_job(Path(options.file), request, options.job)
    if options.task is not None:
        check_task(options.task, output=options.output, force=options.force)
    plans = work_of(options.file or "", request).translate_jobs()
    if options.job is not None or (options.task is not None and len(plans) > 1):
        names = [plan.source for plan in plans]
        plans = (plans[choose_job(names, options.job, source=options.file or "--command")],)
    code = 0
    for number, plan in enumerate(plans, 1):
        if number > 1:
            print("\n")
        task = None if options.task is None or plan.facts else make_task(plan, options.task)
        _tell(
            plan if task is None else task.plan,
            argv=argv,
            output=options.output and _number(options.output, number, len(plans)),
            page=options.report and _number(options.report, number, len(plans)),
            task=task,
        )
        code = max(code, plan.exit_code, EXIT_ASKS if task and task.own.missing else 0)
    return code


def _find_job(folder: Path, request: TranslationRequest, job: str) -> tuple[str, str]:
    """The file in a folder in which a job stands, and the name that it has there."""
    project = read_project(folder, replace(request, settings={}, command=None))
    names = [one.source for one in project.jobs]
    name = names[choose_job(names, job, source=str(folder))]
    return re.sub(r":\d+$", "", name), name


def _translate_project(
    folder: Path, request: TranslationRequest, options: argparse.Namespace
) -> int:
    """Prints a table of the jobs in a folder; recipes are numbered as the rows are."""
    if options.task is not None:
        raise ConfigError(
            f"--task belongs to one job, and {folder} is a folder",
            fix="choose one by its name in the table: --job run.sh",
        )
    project = read_project(folder, request)
    if options.output is not None:
        for number, job in enumerate(project.jobs, 1):
            if job.plan is not None and not job.plan.facts:
                path = _number(options.output, number, len(project.jobs))
                write_text(path, recipe_of(job.plan), fix=ELSEWHERE)
    if options.report is not None:
        html = options.report.suffix != ".json"
        text = report.project_as_html(project) if html else report.project_as_json(project)
        write_text(options.report, text, fix=ELSEWHERE)
    width = shutil.get_terminal_size((_WIDE, 24)).columns
    sys.stdout.write(readable(table_of_project(project, width=width)))
    first = re.sub(r":\d+$", "", project.jobs[0].source)
    print(readable(f"\nlook at one of them: python -m torsh_trainer translate {quote(first)}"))
    return project.exit_code


def _tell(
    plan: Plan,
    *,
    argv: Sequence[str],
    output: Path | None,
    page: Path | None,
    task: TaskFile | None = None,
) -> None:
    """Prints one plan, and writes its recipe, task and report where they are asked for."""
    written = output if output is not None and not plan.facts else None
    if written is not None:
        write_text(written, recipe_of(plan), fix=ELSEWHERE)
    if task is not None:
        write_text(task.path, task.own.text, fix=ELSEWHERE)
    if page is not None:
        html = page.suffix != ".json"
        text = report.as_html(plan) if html else report.as_json(plan)
        write_text(page, text, fix=ELSEWHERE)
    width = shutil.get_terminal_size((_WIDE, 24)).columns
    sys.stdout.write(readable(table_of(plan, width=width)))
    if plan.facts:
        settings = [f"--set {quote(fact.name)}={fact.value}" for fact in plan.facts]
        asked = " ".join(["python -m torsh_trainer translate", *map(quote, argv), *settings])
        print(readable(f"\nfill them in: {asked}"))
        return
    if task is not None:
        print()
        print(readable("\n".join(list_missing(task))))
    if plan.command:
        command = plan.command.replace(RECIPE, quote(str(written or RECIPE)))
        print(readable(f"\nstart it with: {command}"))
    elif written is not None:
        print(f"\n{written}: run it with +recipe={written} and a task")


def _number(path: Path, number: int, count: int) -> Path:
    """The file for one of several jobs: ``job-2.yaml``."""
    if count == 1:
        return path
    return path.with_stem(f"{path.stem}-{number}")


def check_report(path: Path | None) -> None:
    """Makes sure of the name of a report.

    Raises:
        ConfigError: it says neither JSON nor HTML.
    """
    if path is not None and path.suffix not in (".json", ".html", ".htm"):
        raise ConfigError(
            f"--report {path} is neither .json nor .html", fix="end its name with one of them"
        )


def request_of(asked: argparse.Namespace) -> TranslationRequest:
    """What the options of the command line, here and under ``verify --source``, ask for.

    Raises:
        ConfigError: one of them makes no sense.
    """
    return TranslationRequest(
        world_size=_positive(asked.world_size),
        version=asked.source_version,
        context=asked.context,
        mode=asked.mode,
        lenient=asked.lenient,
        settings=settings_of(asked.set),
        command=asked.command,
    )


def _positive(world_size: int | None) -> int | None:
    """``--world-size``, checked.

    Raises:
        ConfigError: it is below 1.
    """
    if world_size is not None and world_size < 1:
        raise ConfigError(
            f"--world-size {world_size} is no number of processes", fix="give 1 or more"
        )
    return world_size


def settings_of(texts: Sequence[str]) -> dict[str, str]:
    """The ``--set NAME=VALUE`` of a command line.

    Raises:
        ConfigError: one of them is something else.
    """
    settings = {}
    for text in texts:
        # A condition of a script may be a name here, and hold == or the like.
        compares = any(sign in text for sign in ("==", "<=", ">=", "!="))
        name, equals, value = text.rpartition("=") if compares else text.partition("=")
        if not equals or not name or not value:
            raise ConfigError(
                f"--set {text} is not NAME=VALUE", fix="for instance --set learning_rate=3e-5"
            )
        settings[name] = value
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torsh_trainer translate",
        description="Translates a DeepSpeed configuration (JSON as DeepSpeed reads it, base64, or "
        "the block in an Accelerate or GPT-NeoX file), a launch file (a shell or Slurm file with "
        "deepspeed, accelerate launch, torchrun, srun or mpirun; read, never executed) or a "
        "Horovod job (a horovodrun line, its --config-file, HOROVOD_ variables, arguments of "
        "DistributedOptimizer as YAML, a training script) into a native recipe, with a verdict for "
        "every key. Exits with 0 when nothing differs, 10 when something is approximate, 11 when "
        "something is refused, 13 when something is missing that only you know, 2 when the file "
        "is invalid. The other direction: translate RECIPE --to deepspeed|accelerate-fsdp|"
        "torchtitan.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="the configuration, launch file, or script; a folder: all jobs in it",
    )
    parser.add_argument(
        "--command",
        metavar="'LINE'",
        help="the line that starts the job (deepspeed, accelerate launch, torchrun, horovodrun, "
        "...), alone or, for Horovod, beside its script",
    )
    parser.add_argument(
        "--output", "-o", type=Path, metavar="RECIPE.yaml", help="write the recipe there"
    )
    parser.add_argument(
        "--task",
        type=Path,
        metavar="FILE.py",
        help="write a task there, which imports the script's model, data and loss; the recipe "
        "names it",
    )
    parser.add_argument(
        "--job",
        metavar="NAME",
        help="of several jobs the one of that name: run.sh:12, or its line: 12",
    )
    parser.add_argument("--force", action="store_true", help="replace the file of --task")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write the report: .json or .html"
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="processes of the job; checks the batch sizes"
    )
    parser.add_argument(
        "--source-version",
        default="newest",
        metavar="VERSION",
        help="of the engine, whose defaults changed; default: DeepSpeed "
        f"{versions.format_version(versions.NEWEST)}, Horovod {horovod_versions.NEWEST}",
    )
    parser.add_argument(
        "--context",
        choices=CONTEXTS,
        default="raw",
        help='who hands the file to DeepSpeed: it decides on clipping and "auto"',
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="exact",
        help="exact reproduces roundings and start-up quirks, so that a run can be continued; "
        "clean states what the author meant, and says what differs; default: exact",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help='fill "auto": a key of DeepSpeed (optimizer.params.lr) or an argument of Hugging '
        "Face's Trainer (learning_rate); Horovod: what reading a script cannot tell (args.lr)",
    )
    parser.add_argument(
        "--lenient", action="store_true", help="only warn of keys that the engine does not know"
    )
    return parser
