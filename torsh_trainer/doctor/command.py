"""The verb ``doctor``: checks of this host or of several; readers of logs and launch scripts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torsh_trainer.doctor.output import FOUND, print_json, show
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils.arguments import VerbParser

_DESCRIPTION = """\
Looks for what stops a job from starting, or slows it, on this host (or on all that --hosts names):
names, network, limits, memory, disks, GPUs, rank variables, software. Tells what was seen, why it
matters and what mends it, and changes nothing. Exits with 0 where nothing was found, 1 where
something was, 2 where the command line makes no sense.

Two words read files instead:
  doctor explain LOG ...     the cause of the errors in a log, with their lines; - is the input
  doctor script FILE ...     mistakes in shell, Slurm and PBS scripts, Dockerfiles, Compose files,
                             Kubernetes manifests, and pages (.md, .txt) that hold such; none is run
"""


def main(argv: Sequence[str]) -> int:
    """Does what ``argv`` asks; returns the exit code.

    Raises:
        ConfigError: the command line makes no sense, or a file is nothing that can be read.
        ResourceError: a file cannot be read, or a host cannot be reached.
    """
    argv = [word for word in argv if word.lower() != "debug=true"]  # the door has read it
    word = argv[0] if argv else ""
    if word in _WORDS:
        return _WORDS[word](argv[1:])
    if word and not word.startswith("-"):
        raise ConfigError(
            f"doctor {word}: no such word",
            fix="write doctor, doctor explain LOG, or doctor script FILE",
        )
    return _examine(_parser().parse_args(argv))


def _examine(options: argparse.Namespace) -> int:
    # Imported late, as below: --help waits for none of it.
    from torsh_trainer.doctor.examination import examine, load_checks
    from torsh_trainer.doctor.machine import Machine
    from torsh_trainer.doctor.report import write_examination, write_list

    only = [name.strip() for text in options.only for name in text.split(",") if name.strip()]
    if options.only and not only:
        raise ConfigError("--only names nothing", fix="leave it out for all checks")
    checks = load_checks(only)
    if options.list:
        print(write_list(checks.items()))
        return 0
    for name in ("nodes", "processes", "port"):
        _check_count(name, getattr(options, name), most=65535 if name == "port" else 10**6)
    if not 0 < options.seconds < 3600:
        raise ConfigError(f"--seconds {options.seconds} is not positive", fix="give 1 to 3600")
    if options.launcher is not None:
        raise ConfigError(
            f"doctor --launcher {options.launcher} is not there: it asks no scheduler for hosts",
            fix="name them with --hosts, or look from within a job: srun python -m torsh_trainer "
            "doctor",
        )
    if options.hosts is not None:
        from torsh_trainer.doctor.hosts import examine_hosts

        return examine_hosts(options, only=only)
    machine = Machine(
        dict(os.environ),
        folder=options.dir,
        nodes=options.nodes or 0,
        processes=options.processes or 0,
        port=options.port or 0,
    )
    found = examine(machine, only=only)
    if options.json:
        print_json(found.as_dict())
    else:
        show(write_examination(found, show_all=options.all))
    return FOUND if found.findings else 0


def _explain(argv: Sequence[str]) -> int:
    parser = VerbParser(
        prog="python -m torsh_trainer doctor explain",
        description="Finds the errors of distributed starts in a log, and says what causes them "
        "and what helps. Exits with 0 where it explains something, 1 where it knows nothing in "
        "the log.",
    )
    parser.add_argument(
        "log", metavar="LOG", nargs="+", help="a log, or a run directory; - reads the input"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    from torsh_trainer.doctor.explain import explain_logs, write_explanation

    found = explain_logs(options.log, sys.stdin)
    if options.json:
        print_json({"explanations": [one.as_dict() for one in found.explanations]})
    else:
        show(write_explanation(found))
    return 0 if found.explanations else FOUND


def _script(argv: Sequence[str]) -> int:
    parser = VerbParser(
        prog="python -m torsh_trainer doctor script",
        description="Reads launch scripts (shell, Slurm, PBS), Dockerfiles, Compose files, "
        "Kubernetes manifests, and pages that hold them, and names their mistakes with line and "
        "correction. Nothing is executed. Exits with 0 where none was found, 1 where some were.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="+",
        help="what to read; several are held against one another, too",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    from torsh_trainer.doctor.script.reading import read_files
    from torsh_trainer.doctor.script.report import write_mistakes

    found = read_files([Path(name) for name in options.file])
    if options.json:
        print_json(found.as_dict())
    else:
        show(write_mistakes(found))
    return FOUND if found.mistakes else 0


_WORDS: dict[str, Callable[[Sequence[str]], int]] = {"explain": _explain, "script": _script}


def _check_count(name: str, value: int | None, *, most: int) -> None:
    if value is not None and not 1 <= value <= most:
        raise ConfigError(f"--{name} {value} is out of range", fix=f"give 1 to {most}")


def _parser() -> VerbParser:
    parser = VerbParser(
        prog="python -m torsh_trainer doctor",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="every check, for programs")
    add("--all", action="store_true", help="what is fine, too")
    add("--list", action="store_true", help="the checks and what they look at; runs none")
    add("--only", action="append", default=[], metavar="NAME,...", help="these checks alone")
    add("--nodes", type=int, metavar="N", help="hosts of the job (default: as variables say, or 1)")
    add(
        "--processes",
        type=int,
        metavar="N",
        help="processes of the job on each host (default: as variables say, or 1)",
    )
    add(
        "--port", type=int, metavar="PORT", help="where the job meets (default: MASTER_PORT, 29500)"
    )
    add(
        "--dir",
        type=Path,
        default=Path("runs"),
        metavar="FOLDER",
        help="where runs and checkpoints go (default: runs)",
    )
    add("--hosts", metavar="HOST,...", help="look at each of these over ssh, and at their network")
    add("--launcher", help=argparse.SUPPRESS)
    add("--python", metavar="PATH", help="of --hosts: Python there (default: this one's path)")
    add(
        "--ssh",
        action="append",
        default=[],
        metavar="OPTION",
        help="of --hosts: an option for ssh, such as --ssh=-p2222; several are repeated",
    )
    add(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="of --hosts: how long the network is tried (default: 10)",
    )
    return parser
