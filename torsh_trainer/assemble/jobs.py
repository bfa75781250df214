"""``python -m torsh_trainer jobs``: what has become of runs that were submitted."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torsh_trainer import environments
from torsh_trainer.assemble import launch, work
from torsh_trainer.assemble.handover import AGAIN, order_within
from torsh_trainer.assemble.submitting import (
    SubmittedJob,
    exit_code_of,
    find_job,
    submit_again,
)
from torsh_trainer.errors import ConfigError, TorshError, nearest
from torsh_trainer.launchers.job_folder import JOB, JobStatus, forget_failure, note_failure
from torsh_trainer.rundir import RunDir
from torsh_trainer.rundir.output import outliving_stdout
from torsh_trainer.utils.arguments import VerbParser
from torsh_trainer.utils.files import strict_json
from torsh_trainer.utils.foreign import escape_controls, readable
from torsh_trainer.utils.masking import mask_text
from torsh_trainer.utils.signals import ends_with_its_run

_PROGRAM = "python -m torsh_trainer jobs"
_DESCRIPTION = """\
Runs that were submitted (launcher=slurm, kubernetes and the like). A RUN is the folder of a run, or
one above several, such as a sweep's.

  list [FOLDER ...]   the jobs below (runs, unless others are named)
  status RUN ...      where they are, and why they wait or ended
  logs RUN            what the job prints; --rank N: what a rank logged; --follow: until it ends
  cancel RUN ...      ends them; what runs may save first, for --grace seconds
  resume RUN ...      submits them again, to go on from their checkpoints
  wait RUN ...        until all have ended; the exit code of the first that has not succeeded
"""
_NO_CHECKPOINTS = ("checkpoints", "logs", "tensorboard", ".hydra", "job")

InWords = Callable[[Exception], TorshError]
"""Any failure as one that speaks to the user."""


def main(argv: Sequence[str], *, in_words: InWords) -> int:
    """Does what ``argv`` asks; returns the exit code.

    Raises:
        ConfigError: there is no such job, or the command line makes no sense.
        ResourceError: the scheduler does not answer.
    """
    argv = [word for word in argv if word.lower() != "debug=true"]  # the door has read it
    if argv and argv[0] == "run":
        return _run(argv[1:], in_words=in_words)
    words = [*_WORDS]
    if argv and not argv[0].startswith("-") and argv[0] not in words:
        raise ConfigError(f"jobs {argv[0]}: no such word", fix=nearest(argv[0], words))
    options = _parser().parse_args(argv)
    return _WORDS[options.word](options)


# -- words ----------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    for folder in options.runs:
        if not folder.is_dir() and folder != Path("runs"):
            raise ConfigError(f"{folder} is no folder", fix="give one that holds runs")
    rows = [_tell(folder) for above in options.runs for folder in _find_folders(above)]
    if options.json:
        print(strict_json({"jobs": rows}))
    elif rows:
        _show_rows(rows)
    else:
        _show(f"no jobs below {', '.join(map(str, options.runs))}")
    return 0


def _status(options: argparse.Namespace) -> int:
    rows = [_tell(folder) for folder in _expand(options.runs)]
    if options.json:
        print(strict_json({"jobs": rows}))
        return 0
    for row in rows:
        _show(f"{row['run_dir']}: {row['launcher']} job {row['id']} is {row['words']}")
    return 0


def _logs(options: argparse.Namespace) -> int:
    folders = _expand([options.run])
    if len(folders) > 1:
        raise ConfigError(
            f"{options.run} holds {len(folders)} jobs", fix=f"give one of them: {folders[0]}"
        )
    job = find_job(folders[0])
    clean = escape_controls if sys.stdout.isatty() else str
    for piece in job.launcher.logs(job.handle, rank=options.rank, follow=options.follow):
        print(clean(mask_text(piece)), end="", flush=True)
    return 0


def _cancel(options: argparse.Namespace) -> int:
    if options.grace < 0:
        raise ConfigError(f"--grace {options.grace:g} is negative", fix="give seconds, or 0")
    folders = _expand(options.runs)
    jobs = [find_job(folder) for folder in folders]
    if len(jobs) > 1:  # of several, those that have ended are passed over
        jobs = [job for job in jobs if not job.status.ended]
    told = []
    for job in jobs:
        told.append(_row(job, job.launcher.cancel(job.handle, grace_s=options.grace)))
        if not options.json:
            _show(f"{told[-1]['run_dir']}: job {told[-1]['id']} is {told[-1]['words']}")
    if options.json:
        print(strict_json({"jobs": told}))
    return 0


def _resume(options: argparse.Namespace) -> int:
    handles = [submit_again(folder) for folder in _expand(options.runs)]
    if options.json:
        print(strict_json({"jobs": [asdict(handle) for handle in handles]}))
    for handle in [] if options.json else handles:
        _show(f"submitted: {handle.launcher} job {handle.id}, {handle.run_dir}")
    return 0


def _wait(options: argparse.Namespace) -> int:
    if options.timeout is not None and options.timeout < 0:
        raise ConfigError(f"--timeout {options.timeout:g} is negative", fix="give seconds")
    end = None if options.timeout is None else time.monotonic() + options.timeout
    rows, codes = [], []
    for folder in _expand(options.runs):
        job = find_job(folder)
        left = None if end is None else max(0.0, end - time.monotonic())
        status = job.launcher.wait(job.handle, timeout_s=left)
        rows.append(_row(job, status))
        codes.append(exit_code_of(status) if status.ended else 1)
        if not options.json:
            _show(f"{folder}: job {job.handle.id} is {status}")
    if options.json:
        print(strict_json({"jobs": rows}))
    return next((code for code in codes if code), 0)


_WORDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "resume": _resume,
    "wait": _wait,
}


def _run(argv: Sequence[str], *, in_words: InWords) -> int:
    """What the job itself calls, once for each of its processes: ``jobs run RUN [--again]``."""
    parser = VerbParser(prog=f"{_PROGRAM} run", description="Within a job: runs what it is of.")
    parser.add_argument("run", type=Path)
    parser.add_argument(AGAIN, action="store_true")
    options = parser.parse_args(argv)
    env = dict(os.environ)
    found = environments.detect(env)
    rank, began = 0 if found is None else found.rank, time.time()
    leads = rank == 0
    ends_with_its_run()
    forget_failure(options.run, rank=rank)
    with outliving_stdout():
        try:
            launch(work, order_within(options.run, found=found, again=options.again), env)
        except Exception as error:
            note_failure(options.run, in_words(error), rank=rank)
            if leads and options.run.is_dir():
                RunDir(options.run).leave_error(in_words(error), since=began)
            raise
    return 0


# -- jobs -----------------------------------------------------------------------------------------


def _find_folders(above: Path) -> Iterator[Path]:
    """The folders of submitted runs at or below ``above``, in the order of their names."""
    for folder, below, files in os.walk(above):
        if JOB in files:
            below[:] = []
            yield Path(folder)
        below[:] = sorted(name for name in below if name not in _NO_CHECKPOINTS)


def _expand(runs: Sequence[Path]) -> list[Path]:
    found = []
    for run in runs:
        below = list(_find_folders(run))
        if not below:
            find_job(run)  # says what is missing
        found += below
    return found


def _tell(folder: Path) -> dict[str, Any]:
    """A row of one job, also where nobody can say how it is."""
    try:
        job = find_job(folder)
    except TorshError as error:
        return {"launcher": "", "id": "", "run_dir": str(folder), "state": "lost"} | {
            "reason": str(error),
            "words": f"lost: {error}",
        }
    try:
        return _row(job, job.status)
    except TorshError as error:
        return {**asdict(job.handle), "state": "unknown", "reason": str(error)} | {
            "words": f"unknown: {error}"
        }


def _row(job: SubmittedJob, status: JobStatus) -> dict[str, Any]:
    return {**asdict(job.handle), **asdict(status), "words": str(status)}


def _show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    width, names = (max(len(str(row[key])) for row in rows) for key in ("id", "launcher"))
    for row in rows:
        where = Path(row["run_dir"])
        with contextlib.suppress(ValueError):
            where = where.relative_to(Path.cwd())
        _show(f"{row['launcher']:<{names}}  {row['id']:>{width}}  {where}  {row['words']}")


def _show(text: str) -> None:
    print(readable(mask_text(text)), flush=True)


def _parser() -> VerbParser:
    parser = VerbParser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    for name in _WORDS:
        word = words.add_parser(name)
        if name == "logs":
            word.add_argument("run", type=Path, metavar="RUN")
            word.add_argument("--rank", type=int, metavar="N", help="this rank's own log")
            word.add_argument("--follow", "-f", action="store_true", help="until the job ends")
            continue
        many = {"nargs": "*", "default": [Path("runs")]} if name == "list" else {"nargs": "+"}
        word.add_argument("runs", type=Path, metavar="RUN", **many)
        word.add_argument("--json", action="store_true", help="for programs")
        if name == "cancel":
            word.add_argument(
                "--grace", type=float, default=30.0, metavar="S", help="to save (default: 30)"
            )
        if name == "wait":
            word.add_argument("--timeout", type=float, metavar="S", help="not longer than this")
    return parser
