"""``python -m torsh_trainer report RUN...``: runs side by side, as one HTML page (and a PNG)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from torsh_trainer.errors import ConfigError
from torsh_trainer.report.charts import charts_of
from torsh_trainer.report.options import OptionCatalog
from torsh_trainer.report.page import page_of
from torsh_trainer.report.png import write_png
from torsh_trainer.report.runs import Run, read_runs
from torsh_trainer.utils.files import write_text
from torsh_trainer.utils.foreign import escape_controls, readable


def main(argv: Sequence[str], *, conf: Sequence[Path] = ()) -> int:
    """Writes the report that ``argv`` asks for, and says where; returns the exit code.

    ``conf`` are the folders with config groups, whose options give runs' strategies their names.

    Raises:
        ConfigError: there is no such run, or none of them has anything to report.
        ResourceError: a file cannot be read or written, or matplotlib is missing for ``--png``.
    """
    options = _parser().parse_args(argv)
    runs = read_runs(options.runs)
    charts = charts_of(runs)
    for run in runs:
        for problem in run.problems:
            print(readable(f"{run.path}: {problem}"), file=sys.stderr)
    if not charts and not any(run.result.get("error") for run in runs):
        raise _nothing_to_draw(runs)
    output = _output(options.output, options.runs)
    offered = OptionCatalog(conf)
    page = page_of(runs, charts, now=datetime.now(), options=offered)
    write_text(output, page, fix="choose another place with --output")
    print(escape_controls(str(output)))
    if options.png and charts:
        picture = output.with_suffix(".png")
        write_png(runs, charts, picture, options=offered)
        print(escape_controls(str(picture)))
    return 0


def _nothing_to_draw(runs: Sequence[Run]) -> ConfigError:
    if not any(run.result for run in runs):
        return ConfigError(
            "nothing to draw: none of these runs has logged anything yet",
            fix="wait for the first report of a run (trainer.log_every), or name another",
        )
    return ConfigError(
        "nothing to draw: none of these runs has logged a number in metrics.jsonl",
        fix="result.json says what came of each; logger.jsonl writes metrics.jsonl (in Python "
        "default_callbacks=True, or the callback Jsonl)",
    )


def _output(chosen: Path | None, paths: Sequence[Path]) -> Path:
    """Where the page goes: unless chosen, into the one folder named, else here."""
    if chosen is None:
        named = paths[0] if paths[0].is_dir() else paths[0].parent
        chosen = named if len(paths) == 1 else Path()
    elif chosen.suffix and chosen.suffix not in (".html", ".htm"):
        raise ConfigError(
            f"--output {chosen} is no name for an HTML page",
            fix=f"use --output {chosen.with_suffix('.html')}; --png adds a picture beside it",
        )
    return chosen if chosen.suffix in (".html", ".htm") else chosen / "report.html"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torsh_trainer report",
        description="Draws what runs have logged, side by side, on one HTML page that needs no "
        "other file: curves of loss, metrics, learning rate and throughput, a table of results, "
        "and where the configurations differ.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run directory, or a folder with some below it (a sweep)",
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="where to write the page; default: report.html in the one RUN named, else here",
    )
    parser.add_argument(
        "--png", action="store_true", help="also write the charts as a picture beside the page"
    )
    return parser
