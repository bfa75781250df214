"""(c) From the shell to the end of the first step, and (d) peak memory, each in a new process."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.comparing import in_new_process, in_turns
from benchmarks.work import table

TITLE = "from the shell to the first step, and (d) peak memory"
STEPS = 100
HERE = Path(__file__).parent

SCRIPTS: dict[str, list[str]] = {
    "bare script": [str(HERE / "scripts" / "bare.py")],
    "ToRSh Trainer (+recipe=digits)": [
        "-m",
        "torsh_trainer",
        "+recipe=digits",
        "strategy=single",
        "trainer.stages=[fit]",
        "checkpoint.at_end=false",
        "+callbacks.mark._target_=benchmarks.scripts.mark.Mark",
    ],
    "Lightning Trainer": [str(HERE / "scripts" / "lightning_script.py")],
}


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """One row for each script: medians over interleaved runs, on the CPU."""
    seen = in_turns(SCRIPTS, _run, rounds=2 if quick else 7)
    rows = [
        {
            "contender": name,
            "first_step_s": statistics.median(run["first_step_s"] for run in runs),
            "peak_mib": statistics.median(run["peak_bytes"] for run in runs) / 2**20,
            "runs": len(runs),
        }
        for name, runs in seen.items()
    ]
    for row in rows:
        row["first_step_ratio"] = row["first_step_s"] / rows[0]["first_step_s"]
        row["peak_ratio"] = row["peak_mib"] / rows[0]["peak_mib"]
        print(
            f"  {row['contender']}: first step after {row['first_step_s']:.2f} s "
            f"({row['first_step_ratio']:.2f}x), peak {row['peak_mib']:.0f} MiB",
            flush=True,
        )
    return rows


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = ("program", "first step (s)", "ratio", "peak memory (MiB)", "ratio", "runs")
    cells = [
        (
            row["contender"],
            f"{row['first_step_s']:.2f}",
            f"{row['first_step_ratio']:.2f}",
            f"{row['peak_mib']:.0f}",
            f"{row['peak_ratio']:.2f}",
            row["runs"],
        )
        for row in rows
    ]
    title = "### (c) From the shell to the first step, and (d) peak memory"
    return f"{title}\n\n{table(head, cells)}"


def _run(name: str) -> dict[str, float]:
    words = SCRIPTS[name]
    steps = f"trainer.max_steps={STEPS}" if "-m" in words else str(STEPS)
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks.json"
        env = {**os.environ, "BENCHMARK_MARKS": str(marks), "PYTHONPATH": str(HERE.parent)}
        began = time.time()
        in_new_process(name, [*words, steps], folder=Path(folder), env=env)
        found = json.loads(marks.read_text(encoding="utf-8"))
    return {"first_step_s": found["first_step"] - began, "peak_bytes": found["peak_bytes"]}
