"""The verb ``drop-in``: a script for Horovod or DeepSpeed, run unmodified over ours."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torsh_trainer import environments
from torsh_trainer.dropin import script as scripts
from torsh_trainer.dropin.deepspeed_line import read_deepspeed_command
from torsh_trainer.dropin.launch_line import honour_variables, read_command
from torsh_trainer.dropin.names import ENGINES
from torsh_trainer.dropin.order import Order
from torsh_trainer.dropin.output import show_logs
from torsh_trainer.dropin.rank import ScriptJob, cut_traceback, file_of, run_script
from torsh_trainer.errors import ConfigError, TorshError, WorkerError, nearest
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.local import Local
from torsh_trainer.utils import registry
from torsh_trainer.utils.user_code import words_of

_GRACE_S = 600.0
"""What a script does at its exit (a logger that uploads) may take as long as this."""
_BACKENDS = ("auto", "gloo", "nccl", "mpi")


def main(argv: Sequence[str]) -> int:
    """Does what ``argv`` asks; returns the exit code.

    Raises:
        ConfigError: the command line makes no sense, or the script cannot run.
        WorkerError: a rank failed.
    """
    argv = [word for word in argv if word.lower() != "debug=true"]  # the door has read it
    order = honour_variables(_read(argv), os.environ)
    script = scripts.read(order.script)
    found = environments.detect(os.environ)
    context = LaunchContext(env=dict(os.environ), found=found)
    launcher = Local(num_processes=order.processes or "auto", grace_s=_GRACE_S)
    if order.processes is None and found is None:
        raise ConfigError("drop-in is not told how many processes", fix="write -np 2")
    first = found is None or found.is_rank_zero
    if first:
        _announce(order, script, launcher.size(context))
    job = ScriptJob(
        str(order.script),
        order.arguments,
        local_rank=script.takes_local_rank and "deepspeed" in script.uses
        if order.passes_local_rank is None
        else order.passes_local_rank,
        backend=order.backend,
        network_interface=order.network_interface,
        startup_timeout_s=order.startup_timeout_s,
        stall_warning_s=order.stall_warning_s,
        stall_shutdown_s=order.stall_shutdown_s,
    )
    _launch(launcher, job, context, order.log_dir)
    return 0


def _launch(launcher: Local, job: ScriptJob, context: LaunchContext, log_dir: Path | None) -> None:
    with _Logs(log_dir) as folder:
        logged = LaunchContext(env=context.env, found=context.found, log_dir=folder)
        try:
            with show_logs(folder):
                launcher.launch(run_script, job, context=logged)
        except WorkerError as error:
            text = str(error.facts.get("traceback", ""))
            if text and error.facts.get("cause") not in ("ConfigError", "ScriptExit"):
                _show(text, job)
            if log_dir is None:
                error.fix = _ABOVE
            raise
        except TorshError:
            raise
        except Exception as error:  # a script that runs in this very process may raise anything
            rank = 0 if context.found is None else context.found.rank
            _show("".join(traceback.format_exception(error)), job)
            raise WorkerError(
                f"rank {rank} failed with {words_of(error)}", fix=_ABOVE, rank=rank
            ) from error


_ABOVE = "the lines above are the script's own"


def _show(text: str, job: ScriptJob) -> None:
    print(cut_traceback(text, file_of(job.script)), file=sys.stderr, flush=True)


class _Logs:
    """The folder for the output of all ranks but the first; without a wish, one that goes again."""

    def __init__(self, wanted: Path | None) -> None:
        self._wanted = wanted
        self._own: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Path:
        if self._wanted is not None:
            self._wanted.mkdir(parents=True, exist_ok=True)
            return self._wanted
        self._own = tempfile.TemporaryDirectory(prefix="torsh-dropin-")
        return Path(self._own.name)

    def __exit__(self, *error: object) -> None:
        if self._own is not None:
            self._own.cleanup()


def _announce(order: Order, script: scripts.Script, size: int) -> None:
    where = "" if script.uses else ", where it is imported,"
    shown = script.uses or ("horovod",)
    what = ", ".join(f"{name}{where} is {ENGINES[name].root}" for name in shown)
    count = "1 process" if size == 1 else f"{size} processes"
    auto = "gloo, or nccl where each has a GPU"
    backend = auto if order.backend == "auto" else order.backend
    print(
        f"drop-in: {order.script} on {count}, communicating by {backend}; {what}, in this "
        "job alone",
        flush=True,
    )
    for line in order.remarks:
        print(f"drop-in: {line}", flush=True)


# -- arguments -------------------------------------------------------------------------------------


def _read(argv: Sequence[str]) -> Order:
    options = _parser().parse_args(argv)
    if options.comm not in (*_BACKENDS, *registry.BACKENDS.names()):
        raise ConfigError(f"--comm {options.comm} is unknown", fix=nearest(options.comm, _BACKENDS))
    words: list[str] = options.words
    if words[:1] == ["--"]:
        words = words[1:]
    if options.command is not None:
        if words:
            raise ConfigError(
                f"drop-in is given a script, {words[0]}, and --command", fix="give one of them"
            )
        env = dict(os.environ)
        theirs = read_deepspeed_command(options.command, env=env)
        order = read_command(options.command, env=env) if theirs is None else theirs
    elif not words:
        raise ConfigError(
            "drop-in is given no script", fix="write drop-in -np 2 train.py, or --command '...'"
        )
    else:
        if Path(words[0]).name.startswith("python") and not words[0].endswith(".py"):
            words = words[1:]
        if not words or words[0].startswith("-"):
            raise ConfigError(
                f"drop-in starts a script, not {shlex.join(options.words)}",
                fix="name the file: drop-in -np 2 train.py",
            )
        order = Order(Path(words[0]), tuple(words[1:]))
    changes: dict[str, object] = {}
    if options.processes is not None:
        changes["processes"] = _count(options.processes)
    if options.log_dir is not None:
        changes["log_dir"] = options.log_dir
    changes["backend"] = options.comm
    return order.change(**changes)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"-np {text} is no number of processes", fix="give 1 or more")
    return int(text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"drop-in: {message}", fix="drop-in --help shows what there is")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m torsh_trainer drop-in",
        description="Runs a script that is written for horovod.torch or for DeepSpeed, unmodified "
        "and without either: import horovod.torch or deepspeed gets modules of ours in the "
        "processes of this job, and nothing of an installed one is read or changed. See "
        "docs/migrate/drop-in.md.",
        usage="%(prog)s [-np N] [--comm BACKEND] [--log-dir DIR] SCRIPT [ARGUMENTS]\n"
        "       %(prog)s [--comm BACKEND] --command 'horovodrun -np 2 python SCRIPT [ARGUMENTS]'",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", dest="processes", metavar="N", help="how many processes")
    add(
        "--comm",
        default="auto",
        metavar="BACKEND",
        help="gloo, nccl, mpi, or auto: nccl where each process has a GPU, else gloo (default)",
    )
    add("--log-dir", type=Path, metavar="DIR", help="keep rank-N.log of every rank but 0 there")
    add("--command", metavar="LINE", help="a line of horovodrun or deepspeed, as it is typed today")
    add("words", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")
    return parser
