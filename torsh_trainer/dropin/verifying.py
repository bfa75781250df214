"""``verify --command LINE``, or the line of ``--launch FILE``, under its engine and by drop-in."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torsh_trainer.dropin.deepspeed_line import read_deepspeed_command
from torsh_trainer.dropin.launch_file import LineToRun, take_line
from torsh_trainer.dropin.launch_line import read_command
from torsh_trainer.dropin.recorded import recording
from torsh_trainer.errors import ConfigError, ResourceError, TrainingError
from torsh_trainer.translate.command import settings_of

FLAG = "--command"
FLAG_OF_FILE = "--launch"
EXIT_APART = 12
_HERE = Path(recording.__file__).parent
_TINY = 1e-30
_FLOOR = 0.01
"""Of the largest parameter: below it a difference is measured by that."""
_SHOWN_LINES = 16
_PATIENCE_S = 30.0
"""An engine may compile its operators for minutes, in silence."""
HELP = """\
python -m torsh_trainer verify --command 'horovodrun -np 2 python train.py ARGS' [--steps 20]
python -m torsh_trainer verify --command 'deepspeed --num_gpus 2 train.py ARGS' [--steps 20]
python -m torsh_trainer verify --launch run.sh [--job 12] [--set NAME=VALUE] [--steps 20]

Runs the line as it stands, under the engine that it is written for, then by drop-in, from the same
seed, and compares every step: loss, gradient norm, learning rate, and the parameters after it. The
script is not changed: what it does is recorded from outside, and each run ends after --steps steps.
Of a launch file the one line that starts a job is taken; the file is read, and never executed.

  --job NAME     of several jobs the one of that name: run.sh:12, or its line: 12
  --set N=VALUE  what only your shell knows: a variable of the launch file, or its argument (1=8)
  --steps N      steps that are compared (20); 0: all that the script takes
  --bound B      allowed relative difference after one step, k times as much after k (1e-6)
  --seed N       seed of torch, NumPy and random before the script begins (0)
  --dir FOLDER   keep what was recorded, and the output of both runs, there

Exit code: 0 within bounds, 12 a bound is broken, 1 the engine is not installed, 2 your input, 3 a
run failed."""


@dataclass(frozen=True)
class ScriptRun:
    """What one run recorded: for every rank the rows of its steps, the parameters before first."""

    ranks: tuple[tuple[Mapping[str, Any], ...], ...]

    @property
    def steps(self) -> int:
        """How many every rank has taken."""
        return min(len(rows) - 1 for rows in self.ranks)


@dataclass(frozen=True)
class Apart:
    """The largest relative difference of a quantity, where, and the first beyond its bound."""

    largest: float = 0.0
    rank: int = 0
    step: int = 0
    first: tuple[int, int, Any, Any] | None = None


QUANTITIES = ("loss", "gradient norm", "learning rate", "parameters")


def main(argv: Sequence[str]) -> int:
    """Does what ``argv`` asks; returns the exit code.

    Raises:
        ConfigError: the line starts nothing that drop-in runs, or an option makes no sense.
        ResourceError: the engine of the line is not installed.
        TrainingError: one of the two runs failed.
    """
    if "--help" in argv or "-h" in argv:
        print(HELP)
        return 0
    options = _parser().parse_args(argv)
    if options.steps < 0 or not options.bound > 0 or not 0 <= options.seed < 2**63:
        raise ConfigError(
            "--steps and --seed count from 0, and --bound is above 0", fix="correct them"
        )
    line = _find_line(options)
    order = read_deepspeed_command(line.text, env=line.env)
    order = order or read_command(line.text, env=line.env)
    program = shutil.which(line.words[0]) or _beside_python(line.words[0])
    if program is None:
        raise ResourceError(
            f"{line.words[0]} is not installed here, and verify runs the line under it",
            fix="install it, or run the line by drop-in alone: python -m torsh_trainer drop-in "
            f"--command {shlex.quote(line.text)}",
        )
    with tempfile.TemporaryDirectory(prefix="torsh-verify-") as temporary:
        folder = Path(options.dir or temporary)
        ours = [sys.executable, "-m", "torsh_trainer", "drop-in", "--command", line.text]
        print("\n".join([f"verify: {line.text}", *(f"  note: {note}" for note in line.notes)]))
        sys.stdout.flush()
        theirs = [program, *line.words[1:]]
        original = _run("engine", replace(line, words=tuple(theirs)), folder, options)
        dropped = _run("drop-in", replace(line, words=tuple(ours)), folder, options)
    steps = min(original.steps, dropped.steps)
    if not steps:
        raise TrainingError(
            "neither run has taken a step of an optimizer", fix="name the line that trains"
        )
    if len(original.ranks) != len(dropped.ranks):
        raise TrainingError(
            f"the engine ran {len(original.ranks)} processes, and drop-in {len(dropped.ranks)}",
            fix="state their number in the line: -np 2",
        )
    found = compare_runs(dropped, original, bound=options.bound)
    print(_table_of(found, steps, len(original.ranks), options.bound, str(order.script)))
    if original.steps != dropped.steps:
        print(f"APART: the engine took {original.steps} steps, and drop-in {dropped.steps}")
        return EXIT_APART
    return EXIT_APART if any(apart.first for apart in found.values()) else 0


def _find_line(options: argparse.Namespace) -> LineToRun:
    """The line that is stated, or that of a launch file.

    Raises:
        ConfigError: there is none, or it cannot be run by itself.
        ResourceError: the file cannot be read.
    """
    env = dict(os.environ)
    if options.launch is not None:
        settings = settings_of(options.set)
        return take_line(options.launch, job=options.job, settings=settings, env=env)
    if options.job is not None or options.set:
        raise ConfigError("--job and --set are about a launch file", fix="name it: --launch run.sh")
    return LineToRun(tuple(shlex.split(options.command)), env=env)


def compare_runs(mine: ScriptRun, expected: ScriptRun, *, bound: float) -> dict[str, Apart]:
    """Quantity -> how far apart, over all ranks and steps; step 0 compares parameters alone."""
    found = dict.fromkeys(QUANTITIES, Apart())
    for rank, (rows, others) in enumerate(zip(mine.ranks, expected.ranks, strict=True)):
        for row, other in zip(rows, others, strict=False):
            for quantity, one, another in _pairs_of(row, other):
                limit = 1e-9 if quantity == "learning rate" else bound * max(1, row["step"])
                if quantity == "parameters":
                    limit = max(limit, _unit_of(row, other) or 0.0)
                    difference = _of_parameters(one, another)
                else:
                    difference = _of_numbers(one, another)
                apart = found[quantity]
                first = apart.first
                if difference > limit and (first is None or row["step"] < first[0]):
                    first = (row["step"], rank, one, another)
                if difference > apart.largest:
                    apart = Apart(difference, rank, row["step"], first)
                found[quantity] = Apart(apart.largest, apart.rank, apart.step, first)
    return found


def _pairs_of(row: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    seen = "parameters" if _unit_of(row, other) is None else "rounded"
    pairs = [("parameters", row[seen], other[seen])]
    if row["step"]:
        pairs += [
            ("loss", row["losses"], other["losses"]),
            ("gradient norm", [row["grad_norm"]], [other["grad_norm"]]),
            ("learning rate", row["lr"], other["lr"]),
        ]
    return pairs


def _unit_of(row: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Where one of two shows no masters in fp32: the step of the dtype that it does show.

    Both are compared in that dtype then, in which a value may be rounded to either side.
    """
    if row.get("held") == other.get("held"):
        return None
    held = {*row["held"], *other["held"]}
    return 2.0**-8 if "torch.bfloat16" in held else 2.0**-11


def _of_numbers(mine: Sequence[float | None], expected: Sequence[float | None]) -> float:
    """The largest relative difference of two lists; infinite where they are not alike."""
    if len(mine) != len(expected):
        return math.inf
    return max(map(_of_number, mine, expected), default=0.0)


def _of_number(mine: float | None, expected: float | None) -> float:
    if mine is None or expected is None:
        return 0.0 if mine is expected else math.inf
    if not (math.isfinite(mine) and math.isfinite(expected)):
        return 0.0 if mine == expected or (mine != mine and expected != expected) else math.inf
    return abs(mine - expected) / max(abs(expected), _TINY)


def _of_parameters(mine: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Relative to the norm of each, or to a hundredth of the largest of all."""
    if [len(one) for one in mine] != [len(one) for one in expected]:
        return math.inf
    floor = _FLOOR * max((one[0] for one in expected), default=0.0)
    largest = 0.0
    for one, other in zip(mine, expected, strict=True):
        size = max(other[0], floor, _TINY)
        apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
        apart[1] /= max(1.0, abs(other[1]) / size)  # a sum is rounded by its own size
        worst = max(apart) / size
        largest = math.inf if worst != worst else max(largest, worst)
    return largest


def _run(name: str, line: LineToRun, folder: Path, options: argparse.Namespace) -> ScriptRun:
    """Runs a line, under its ``engine`` or by ``drop-in``, and reads what was recorded.

    Raises:
        TrainingError: it failed.
    """
    records = folder / name
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir(parents=True)
    env = {
        **line.env,
        recording.FOLDER: str(records.resolve()),
        recording.STEPS: str(options.steps),
        recording.SEED: str(options.seed),
    }
    env.setdefault("OMP_NUM_THREADS", "1")
    if name == "engine":
        known = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        env["PYTHONPATH"] = os.pathsep.join([str(_HERE), *known])
    output = records / "output.txt"
    with output.open("w") as stream:
        process = subprocess.Popen(
            line.words,
            env=env,
            cwd=line.folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        code = _wait(process, name, output)
    files = sorted(records.glob("rank-*.jsonl"), key=lambda path: int(path.stem[5:]))
    ranks = tuple(tuple(json.loads(line) for line in path.open()) for path in files)
    if code or not ranks or not all(ranks):
        _show_failure(output.read_text(errors="replace").strip().splitlines())
        what = f"ended with {code}" if code else "took no step of an optimizer of torch"
        raise TrainingError(f"{line.text} {what}", fix="its output is above")
    run = ScriptRun(ranks)
    print(f"  {name}: {len(ranks)} processes, {run.steps} steps", flush=True)
    return run


def _wait(process: subprocess.Popen[bytes], name: str, output: Path) -> int:
    """The exit code; says now and then that it has not ended, and what was last heard of it."""
    began = time.monotonic()
    try:
        while True:
            try:
                return process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                said = output.read_text(errors="replace").split("\n")
                last = next((line for line in reversed(said) if line.strip()), "no word yet")
                took = time.monotonic() - began
                print(f"  {name}: not done after {took:.0f} s; its last line: {last[:200]}")
                sys.stdout.flush()
    finally:
        if process.returncode is None:  # whoever waits was interrupted
            process.terminate()
            process.wait()


def _show_failure(lines: Sequence[str]) -> None:
    """Prints the first traceback, which is the cause of the others; else the end."""
    first = next((at for at, line in enumerate(lines) if "Traceback" in line), None)
    shown = lines[-_SHOWN_LINES:] if first is None else lines[first : first + _SHOWN_LINES]
    print("\n".join(f"  {line}" for line in shown), file=sys.stderr)


def _table_of(found: Mapping[str, Apart], steps: int, ranks: int, bound: float, script: str) -> str:
    lines = [f"{script}: {steps} steps of {ranks} processes, by drop-in beside the engine"]
    for quantity, apart in found.items():
        where = f"at step {apart.step}, rank {apart.rank}" if apart.largest else ""
        verdict = "APART" if apart.first else "agrees"
        size = f"{apart.largest:.1e}" if apart.largest else "0"
        lines.append(f"  {quantity:14}  {size:>8}  {verdict:7} {where}".rstrip())
    lines.append(f"allowed: {bound:g} relative after one step, k times as much after k")
    parted = [(apart.first[0], quantity) for quantity, apart in found.items() if apart.first]
    if parted:
        step, quantity = min(parted, key=lambda pair: (pair[0], QUANTITIES.index(pair[1])))
        lines.append(f"APART: {quantity} parts first, at step {step}")
    return "\n".join(lines)


def _beside_python(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"verify: {message}", fix="verify --command --help tells all")


def _parser() -> _Parser:
    parser = _Parser(prog="python -m torsh_trainer verify", add_help=False, allow_abbrev=False)
    stated = parser.add_mutually_exclusive_group(required=True)
    stated.add_argument(FLAG)
    stated.add_argument(FLAG_OF_FILE, type=Path)
    parser.add_argument("--job")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bound", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path)
    return parser
