"""``make gpu``: on a machine with a GPU, the tests marked ``gpu``, then the benchmarks.

Standard library only: it runs before anything is installed. Each part is a process of its own with
a limit, within a budget for all; what was not run is named in gpu.json and gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import record
from benchmarks.gpu.prepare import (
    OLDEST,
    NotHere,
    check_gpu,
    install,
    look_at,
    offline_words,
    own_python,
    release_of,
)

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 540.0
LEAST_S = 10.0
"""With less left, a part is not begun."""


@dataclass(frozen=True)
class Part:
    """A process, and the seconds that it may take.

    ``needs`` is a package, if any; ``tests`` are files of ``tests/cuda``, without ``test_``.
    """

    name: str
    title: str
    limit_s: float
    needs: str = ""
    tests: tuple[str, ...] = ()


# Few and whole tests first, then what is measured; the many small ones take what is left.
PARTS = (
    Part(
        "tests",
        "tests marked gpu",
        180,
        tests=("steps", "runs", "groups", "draws", "attention"),
    ),
    Part("throughput", "GPT-2 124M beside a bare compiled loop", 150),
    Part("lightning", "Lightning beside a bare compiled loop", 120, needs="lightning"),
    Part("accelerate", "Accelerate beside a bare compiled loop", 120, needs="accelerate"),
    Part("cost", "operators and host time of a step", 60),
    Part("idle", "what the device has nothing to do", 90),
    Part("sharded", "FSDP beside FSDP2", 60),
    Part("saving", "checkpoints", 60),
    Part("contracts", "contracts of strategies and communicators", 240, tests=("contracts",)),
)
A_TEST_S = 100.0
"""A test of a GPU that takes longer hangs; the others go on."""


def main(words: list[str] | None = None) -> int:
    """Runs what is asked for: 0; 1 if something failed; 2 if this machine lacks something."""
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where results go")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all parts")
    parser.add_argument("--only", default="", help=f"parts, with commas: {names}")
    parser.add_argument("--offline", action="store_true", help="with what is installed")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: tiny models and the CPU forms, to see that the command works",
    )
    options = parser.parse_args(words)
    chosen = [part for part in PARTS if not options.only or part.name in options.only.split(",")]
    if unknown := set(filter(None, options.only.split(","))) - {part.name for part in PARTS}:
        parser.error(f"--only: no part {', '.join(sorted(unknown))}; there are {names}")
    try:
        python = _python(options)
    except NotHere as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    found = Course(options.out.resolve(), options.device, options.budget_s, python).run(chosen)
    print((options.out / "gpu.md").read_text(encoding="utf-8"))
    print(f"written: {options.out / 'gpu.json'} and {options.out / 'gpu.md'}")
    return int(any(part["outcome"] == "failed" for part in found["parts"].values()))


def _python(options: argparse.Namespace) -> str:
    python = own_python()
    if options.device == "cpu":
        return python
    check_gpu()
    if options.offline:
        print(offline_words(python, look_at(python)), flush=True)
        return python
    return install(python, ROOT, lambda text: print(text, flush=True))


class Course:
    """Runs parts one after another and writes what they came to into ``out``, after each."""

    def __init__(self, out: Path, device: str, budget_s: float, python: str) -> None:
        self.out, self.device, self.python = out, device, python
        self.ends_s = time.monotonic() + budget_s
        self.budget_s = budget_s
        self.found: dict[str, Any] = {
            "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": _commit(),
            "budget_s": budget_s,
            "facts": {},
            "parts": {},
        }
        self.rows: list[list[str]] = []

    def run(self, parts: list[Part]) -> dict[str, Any]:
        """What was found of all."""
        facts = self._measure(Part("facts", "the device", 60))
        self.found["facts"] = facts.get("found", {"words": facts["words"]})
        old = release_of(self.found["facts"].get("versions", {}).get("torch", "")) < OLDEST
        for number, part in enumerate(parts):
            print(f"({number + 1} of {len(parts)}) {part.title}", flush=True)
            began = time.monotonic()
            told = self._run_part(part, old)
            told["seconds"] = round(time.monotonic() - began, 1)
            self.found["parts"][part.name] = told
            print(f"    {told['outcome']}{': ' * bool(told['words'])}{told['words']}", flush=True)
            self._write()
        return self.found

    def _run_part(self, part: Part, old: bool) -> dict[str, Any]:
        versions = self.found["facts"].get("versions", {})
        if self.ends_s - time.monotonic() < LEAST_S:
            return _left_out(f"the budget of {self.budget_s:g} s is spent")
        if part.needs and versions.get(part.needs, "not installed") == "not installed":
            return _left_out(f"{part.needs} is not installed")
        if part.name == "sharded" and old:
            return _left_out(f"FSDP needs torch {'.'.join(map(str, OLDEST))}")
        if part.name == "contracts" and self.device == "cpu":
            return _left_out("their form on CPUs is tests/distributed")
        return self._run_tests(part, old) if part.tests else self._measure(part)

    def _measure(self, part: Part) -> dict[str, Any]:
        file = self.out / f"{part.name}.json"
        file.unlink(missing_ok=True)
        words = ["benchmarks.gpu.measure", part.name, "--device", self.device, str(file)]
        outcome, why = self._process(part, words)
        if outcome != "done":
            return {"outcome": outcome, "words": why}
        found = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        self.rows += found["rows"]
        return {"outcome": "done", "words": "", "found": found["found"]}

    def _run_tests(self, part: Part, old: bool) -> dict[str, Any]:
        file = self.out / f"{part.name}.jsonl"
        file.unlink(missing_ok=True)
        marked = "gpu" if self.device == "cuda" else "not gpu"
        words = ["pytest", "-q", "-p", "benchmarks.gpu.record", "--record", str(file)]
        words += ["-p", "no:cacheprovider", "-m", marked, "--tb=short", f"--timeout={A_TEST_S:g}"]
        words += ["-k", "not fsdp and not FSDP and not collective"] if old else []
        words += [str(ROOT / "tests" / "cuda" / f"test_{name}.py") for name in part.tests]
        outcome, why = self._process(part, words)
        found = record.read(file)
        passed, failed = len(found["passed"]), len(found["failed"])
        skipped = [f"{len(names)} not run: {reason}" for reason, names in found["skipped"].items()]
        late = [f"{len(found['not_run'])} not run: out of time"] if found["not_run"] else []
        bad = [f"failed: {name.rpartition('/')[2]}" for name in found["failed"]]
        remarks = "; ".join(
            [*bad, *skipped, *late, *(["FSDP and collectives by name left out"] if old else [])]
        )
        title = part.title if self.device == "cuda" else f"CPU forms of {part.title}"
        self.rows.append([title, f"{passed} passed, {failed} failed", "", remarks])
        log = self.out / f"{part.name}.log"
        if failed:
            outcome, why = "failed", f"{failed} tests failed, see {log}"
        elif outcome == "failed" and not passed:
            why = f"no test ended well, see {log}"
        elif outcome == "failed":  # ended badly after its tests
            why = f"pytest ended badly, see {log}"
        return {"outcome": outcome, "words": why, "found": found}

    def _process(self, part: Part, words: list[str]) -> tuple[str, str]:
        """``python -m words``, with its output in a log: (outcome, why)."""
        limit_s = min(part.limit_s, max(1.0, self.ends_s - time.monotonic()))
        env = {**os.environ, "PYTHONPATH": _path(), "TOKENIZERS_PARALLELISM": "false"}
        log = self.out / f"{part.name}.log"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [self.python, "-m", *words],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return "out of time", f"stopped after {limit_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # what it has started as well
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return ("done", "") if code == 0 else ("failed", f"exit code {code}, see {log}")

    def _write(self) -> None:
        text = json.dumps(self.found, indent=1)
        (self.out / "gpu.json").write_text(text + "\n", encoding="utf-8")
        (self.out / "gpu.md").write_text(self._table(), encoding="utf-8")

    def _table(self) -> str:
        head = ["what", "measured", "beside plain PyTorch", "remarks"]
        lines = [_line(head), _line(["---"] * len(head)), *map(_line, self.rows)]
        for name, told in self.found["parts"].items():
            if told["outcome"] != "done":
                lines.append(_line([name, told["outcome"], "", told["words"]]))
        missing = [part.name for part in PARTS if part.name not in self.found["parts"]]
        if missing:
            lines.append(_line([", ".join(missing), "not run", "", "not asked for, or not yet"]))
        head_line = f"`make gpu` of {self.found['when']}, commit {self.found['commit']}."
        return "\n".join([head_line, "", *lines, ""])


def _left_out(why: str) -> dict[str, Any]:
    return {"outcome": "not run", "words": why}


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _path() -> str:
    """For what is not installed: this checkout and its plugins, and what the user's shell names."""
    plugins = sorted(str(path) for path in (ROOT / "plugins").iterdir() if path.is_dir())
    return os.pathsep.join(filter(None, [str(ROOT), *plugins, os.environ.get("PYTHONPATH", "")]))


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
