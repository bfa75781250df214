"""The verb ``comm``: its arguments, what is launched for them, and what is written."""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torsh_trainer import __version__, environments
from torsh_trainer.bench.running import measure
from torsh_trainer.bench.tables import pages
from torsh_trainer.distributed.bench import COLLECTIVES, DTYPES, BenchPlan, sizes_between
from torsh_trainer.errors import ConfigError, ResourceError, TrainingError, nearest
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.utils.arguments import VerbParser
from torsh_trainer.utils.files import strict_json

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_SIZE = re.compile(r"(\d+)\s*([kmg]?)(i?b)?", re.IGNORECASE)


def main(argv: Sequence[str]) -> int:
    """Does what ``argv`` asks; returns the exit code.

    Raises:
        ConfigError: the command line makes no sense.
        ResourceError: a backend that was named is not available, or a file cannot be written.
        TrainingError: a collective failed, or gave wrong values.
    """
    argv = [word for word in argv if word.lower() != "debug=true"]  # the door has read it
    if argv and not argv[0].startswith("-") and argv[0] != "bench":
        raise ConfigError(f"comm {argv[0]}: no such word", fix="write comm bench")
    options = _parser().parse_args(argv)
    plan = _plan(options)
    outputs = Outputs(options.json, options.png)
    outputs.check()
    context = LaunchContext(env=dict(os.environ), found=environments.detect(os.environ))
    answer = measure(
        plan,
        backends=_parse_names(options.backends, None),
        processes=_count(options.processes, "--processes"),
        timeout_s=options.timeout,
        context=context,
    )
    if answer is None:  # a process that somebody else started, and not the first
        return 0
    for page in pages(answer.records, answer.left_out, plan):
        print(page)
    outputs.write(answer.records, answer.left_out, plan)
    wrong = [record for record in answer.records if record["wrong"]]
    if wrong:
        first = wrong[0]
        raise TrainingError(
            f"{len(wrong)} measurements gave wrong values, the first {first['backend']} "
            f"{first['collective']} of {first['bytes']} bytes",
            fix="do not train on this backend here; see the column wrong",
        )
    return 0


@dataclass(frozen=True)
class Outputs:
    """Files to write beside the table; None is no file."""

    json: Path | None
    png: Path | None

    def check(self) -> None:
        """Finds out before a long measurement what could not be written after it.

        Raises:
            ConfigError: a name that cannot be a file.
            ResourceError: matplotlib is missing for a picture.
        """
        for option, path in (("--json", self.json), ("--png", self.png)):
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ConfigError(
                    f"{option} {path} cannot be a file", fix="name one in a folder that exists"
                )
        if self.png is not None and find_spec("matplotlib") is None:
            raise ResourceError(
                "comm bench --png needs matplotlib, which is not installed",
                fix='pip install "torsh-trainer[report]", or leave --png out',
                library="matplotlib",
            )

    def write(
        self, records: Sequence[dict[str, Any]], left_out: dict[str, str], plan: BenchPlan
    ) -> None:
        """Writes what was asked for, and says where.

        Raises:
            ResourceError: a file cannot be written.
        """
        try:
            if self.json is not None:
                self.json.write_text(strict_json(_document(records, left_out, plan)), "utf-8")
                print(self.json)
            if self.png is not None:
                # Imported late: it draws with matplotlib, which few have.
                from torsh_trainer.bench.picture import write_png

                write_png(records, self.png)
                print(self.png)
        except OSError as error:
            raise ResourceError(
                f"cannot write {error.filename}: {error.strerror}", fix="choose another place"
            ) from error


def _document(
    records: Sequence[dict[str, Any]], left_out: dict[str, str], plan: BenchPlan
) -> dict[str, Any]:
    return {
        "torsh_trainer": __version__,
        "torch": version("torch"),
        "host": platform.node(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plan": asdict(plan),
        "left_out": left_out,
        "records": list(records),
    }


# -- arguments -------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> BenchPlan:
    least, most = _size(options.min, "--min"), _size(options.max, "--max")
    if least > most:
        raise ConfigError(
            f"--min {options.min} is above --max {options.max}", fix="swap them, or drop one"
        )
    factor = _count(options.factor, "--factor")
    assert factor is not None
    if factor < 2:
        raise ConfigError("--factor 1 would never get from --min to --max", fix="give 2 or more")
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype} is unknown", fix=nearest(options.dtype, DTYPES))
    for name in ("seconds", "timeout"):
        if not 0 < getattr(options, name) < math.inf:
            raise ConfigError(
                f"--{name} {getattr(options, name)} is not positive", fix="give a time in seconds"
            )
    if options.warmup < 0:
        raise ConfigError(f"--warmup {options.warmup} is below 0", fix="give 0 or more")
    iterations = _count(options.iterations, "--iterations")
    assert iterations is not None
    return BenchPlan(
        collectives=_parse_names(options.collectives, COLLECTIVES, option="--collectives"),
        sizes=sizes_between(least, most, factor),
        dtype=options.dtype,
        iterations=iterations,
        warmup=options.warmup,
        seconds=options.seconds,
        by_algorithm=options.algorithms,
    )


def _parse_names(
    text: str | None, known: Sequence[str] | None, *, option: str = "--backends"
) -> tuple[str, ...]:
    """The names of a list with commas; all of ``known`` without one."""
    if text is None:
        return tuple(known or ())
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if known is not None and name not in known:
            raise ConfigError(f"{option} {name}: no such name", fix=nearest(name, known))
    if not names:
        raise ConfigError(f"{option} names nothing", fix="leave it out for all of them")
    return names


def _size(text: str, option: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{option} {text} is no size", fix="write 4096, 64K, 256M or 1G")
    return int(match[1]) * _UNITS[match[2].lower()]


def _count(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{option} {text} is no count", fix="give 1 or more")
    return int(text)


def _parser() -> VerbParser:
    parser = VerbParser(
        prog="python -m torsh_trainer comm", description="How processes exchange values."
    )
    words = parser.add_subparsers(dest="word", required=True, metavar="bench")
    bench = words.add_parser(
        "bench",
        help="measure collectives over all backends, side by side",
        description="Measures collectives over every available backend between processes of this "
        "machine (or of the job that this command is started in), and prints latency, algorithm "
        "and bus bandwidth as nccl-tests define them. Values are checked.",
    )
    add = bench.add_argument
    add("--processes", metavar="N", help="how many (default: one per GPU, else 2)")
    add("--backends", metavar="NAME,...", help="default: all that are available")
    add("--collectives", metavar="NAME,...", help=f"default: {', '.join(COLLECTIVES)}")
    add("--min", default="1K", metavar="SIZE", help="smallest size (default: 1K)")
    add("--max", default="256M", metavar="SIZE", help="largest size (default: 256M)")
    add("--factor", default="4", metavar="N", help="from one size to the next (default: 4)")
    add("--dtype", default="float32", metavar="DTYPE", help=", ".join(DTYPES))
    add("--iterations", default="20", metavar="N", help="repetitions of a size (default: 20)")
    add("--warmup", type=int, default=5, metavar="N", help="before they count (default: 5)")
    add(
        "--seconds",
        type=float,
        default=0.5,
        metavar="S",
        help="fewer repetitions where they would take longer (default: 0.5)",
    )
    add(
        "--algorithms",
        action="store_true",
        help="all_reduce by ring, tree and hierarchy too: the table for NcclScheduler",
    )
    add("--timeout", type=float, default=300.0, metavar="S", help="of a collective (default: 300)")
    add("--json", type=Path, metavar="FILE", help="write every number for programs")
    add("--png", type=Path, metavar="FILE", help="draw times and bus bandwidths")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
